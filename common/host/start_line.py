"""One line in the log of a process that has loaded its models: what it computes on, and with what."""

import sys

from prefixrl.common.host.memory_use import memory_now

GIB = 2**30


def start_line(device: str, *facts: str) -> str:
    """Return device, driver and torch, then the facts, then the bytes that this process holds now.

    A process that imported no torch has loaded no model. vLLM's own processes may hold what this one does not.
    """
    torch = sys.modules.get("torch")
    memory = memory_now()
    resident = (
        f"{memory.resident_bytes / GIB:.2f} GiB resident" if memory else "its memory is not known"
    )
    if torch is None:
        return "; ".join(filter(None, ("no device: torch is not loaded", *facts, resident)))
    build = f"torch {torch.__version__}"
    memory_words = resident
    if device == "cpu" or not torch.cuda.is_available():
        threads = torch.get_num_threads()
        where = f"cpu ({torch.backends.cpu.get_cpu_capability()}), {threads} threads"
    else:
        # Late: it imports torch.
        from prefixrl.common.host.cuda import driver

        index = torch.device(device if device.startswith("cuda:") else "cuda:0")
        allocated = torch.cuda.memory_allocated(index) / GIB
        reserved = torch.cuda.memory_reserved(index) / GIB
        memory_words = f"{allocated:.2f} GiB allocated, {reserved:.2f} reserved on it; {resident}"
        where = f"{index}, {torch.cuda.get_device_name(index)}; driver: {driver()}"
        build += f", CUDA {torch.version.cuda}"
    return "; ".join(filter(None, (where, build, *facts, memory_words)))
