"""The sandbox inside: `main PARENT_PID STATUS_FD NAME=LIMIT... LIBRARY... -- COMMAND...`.

Started by `runner.py` with `python -I -S`, once per program, so it imports only fast parts of the
standard library.

    watcher (this process: a user namespace, keeps the time)
      └── init (its own pid, mount, network, ipc, uts and cgroup namespace; nobody, no capabilities)
            └── the command (resource limits, seccomp filter)

Whatever the command starts dies with init, and init with the watcher. One line is written to
STATUS_FD: `exit 0`, `signal 9`, `timeout` or `refused REASON`.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
import time
from functools import partial

LIBC = ctypes.CDLL(None, use_errno=True)
NOBODY = 65534
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH = 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY_NOSUID = -100, 0x8000, 3
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
SCRATCH = "/scratch"
ENVIRONMENT = dict(
    HOME=SCRATCH, TMPDIR=SCRATCH, PATH="/usr/bin:/bin", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1"
)
ROOTS = ("/mnt", "/media", "/srv", "/opt", "/tmp")

with open(os.path.join(os.path.dirname(__file__), "system_calls.txt"), encoding="utf-8") as _file:
    _CALLS = [line.split() for line in _file if line.strip() and not line.startswith("#")]
ALLOWED = {name: (int(x86_64), int(aarch64)) for name, x86_64, aarch64 in _CALLS}
# Allowed with some values only: numbers, offset of the argument in the filter's data, values.
ALLOWED_WITH = {
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; those of sockets ask the network's devices.
    "ioctl": ((16, 29), 24, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # AF_UNIX, with which asyncio wakes itself. No `socket`: nothing to connect.
    "socketpair": ((53, 199), 16, (1,)),
}
NEWEST = max(map(max, ALLOWED.values()))
CLONE, CLONE3 = (56, 220), 435
NAMESPACES = 0x7E020000
"""CLONE_NEWNS (0x20000); from 0x2000000 on a bit each: _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET."""
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
EPERM, ENOSYS = 1, 38
REFUSED, UNKNOWN = EPERM, ENOSYS
WAKING = (signal.SIGCHLD, signal.SIGTERM)
"""Signals that the watcher awaits: SIGTERM from its parent ends the program early."""


def call_libc(name: str, *arguments: object) -> int:
    """Call a function of the C library; raises OSError with its name."""
    result: int = getattr(LIBC, name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def mount(
    target: str,
    flags: int,
    source: bytes | None = None,
    kind: bytes | None = None,
    options: str | None = None,
) -> None:
    """Mount a file system, or change one that is mounted."""
    data = options.encode() if options else None
    call_libc("mount", source, target.encode(), kind, ctypes.c_ulong(flags), data)


def bind_path(source: str, target: str) -> None:
    """Show a file or folder read-only under the new root."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(target, MS_BIND | MS_REC, source=source.encode())
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY_NOSUID, 0, 0, 0)
    number, size = ctypes.c_long(442), ctypes.c_size_t(len(attributes))
    call_libc("syscall", number, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, size)


def mount_tmpfs(target: str, options: str) -> None:
    """Mount an empty file system in memory."""
    mount(target, MS_NOSUID | MS_NODEV, b"none", b"tmpfs", options)


def enter_root(libraries: list[str], scratch_bytes: int) -> None:
    """Build a root: the system's programs and libraries, read-only, and a scratch folder."""
    mount("/", MS_REC | MS_PRIVATE)
    visible = [path for path in (*SYSTEM, *libraries, *DEVICES) if os.path.exists(path)]
    root = next(
        path
        for path in ROOTS
        if os.path.isdir(path) and not any(f"{other}/".startswith(f"{path}/") for other in visible)
    )
    mount_tmpfs(root, "size=1m,nr_inodes=4k,mode=755")
    for path in visible:
        if any(path != other and path.startswith(f"{other}/") for other in visible):
            continue
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        else:
            bind_path(path, root + path)
    os.mkdir(root + SCRATCH)
    mount_tmpfs(root + SCRATCH, f"size={scratch_bytes},nr_inodes=1k,mode=777")
    if not os.path.lexists(root + "/tmp"):  # it is there where the interpreter stands in it
        os.symlink(SCRATCH, root + "/tmp")
    os.mkdir(root + "/old")
    call_libc("pivot_root", root.encode(), (root + "/old").encode())
    os.chdir("/")
    call_libc("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    mount("/", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(SCRATCH)


def drop_privileges(is_root: bool) -> None:
    """Become the user `nobody`, without capabilities, for ever."""
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call_libc("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    call_libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def seccomp_filter() -> bytes:
    """Build the filter: calls that are not allowed fail, another architecture ends the process.

    They fail with an error that Python names, and that a program may handle, instead of a silent
    end. To a C library that knows newer calls than this file the kernel seems older, so that it
    falls back.
    """
    column, audit = ARCHITECTURES[os.uname().machine]
    refuse, unknown, allow, kill = 0x50000 | REFUSED, 0x50000 | UNKNOWN, 0x7FFF0000, 0x80000000

    def test(code: int, value: int, skip_true: int = 0, skip_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, skip_true, skip_false, value)

    load, answer = partial(test, 0x20), partial(test, 0x06)

    equal, at_least, any_bit = 0x15, 0x35, 0x45
    program = load(4) + test(equal, audit, 1, 0) + answer(kill) + load(0)
    program += test(at_least, NEWEST + 1, 0, 1) + answer(unknown)  # the x32 calls, too
    program += test(equal, CLONE3, 0, 1) + answer(unknown)  # its flags cannot be read
    program += test(equal, CLONE[column], 0, 4) + load(16)
    program += test(any_bit, NAMESPACES, 0, 1) + answer(refuse) + answer(allow)
    for numbers, offset, values in ALLOWED_WITH.values():
        checks = (
            load(offset)
            + b"".join(test(equal, each, 0, 1) + answer(allow) for each in values)
            + answer(refuse)
        )
        program += test(equal, numbers[column], 0, len(checks) // 8) + checks
    for numbers in ALLOWED.values():
        if numbers[column] >= 0:
            program += test(equal, numbers[column], 0, 1) + answer(allow)
    return program + answer(refuse)


def apply_filter() -> None:
    """Filter the system calls of this process and of all its children."""
    program = seccomp_filter()
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    call_libc("prctl", PR_SET_SECCOMP, 2, head, 0, 0)


def set_limits(limits: dict[str, int]) -> None:
    """Set resource limits. Processes are counted in this user namespace."""
    values = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"],
    }
    for kind, value in values.items():
        resource.setrlimit(kind, (value, value))


def run_init(writer: int, libraries: list[str], command: list[str], limits: dict[str, int]) -> None:
    """Build the root in the namespaces, start the command, report its end."""
    # A session of its own: `kill(0, ...)` of the command must not reach the watcher. A handler of Python's would let
    # the command interrupt init, which as the first process of its namespace is out of reach of all others.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    call_libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        call_libc("sethostname", b"sandbox", 7)
        enter_root(libraries, limits["scratch_bytes"])
        drop_privileges(os.getuid() == 0)
        call_libc(
            "prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0
        )  # a change of user takes it back
        program = os.fork()
    except OSError as error:
        os.write(writer, refusal_line(error))
        return
    if program == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            set_limits(limits)
            apply_filter()
            os.execve(command[0], command, ENVIRONMENT)
        except OSError as error:
            os.write(writer, refusal_line(error))
        os._exit(127)
    pid = 0
    while pid != program:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os.write(writer, b"exit %d" % code if code >= 0 else b"signal %d" % -code)


def enter_user_namespace() -> None:
    """Become root of a namespace in which only this user (and nobody, if this is root) exists."""
    uid, gid, watcher = os.geteuid(), os.getegid(), os.getpid()
    ready = os.pipe()
    helper = os.fork()
    if helper == 0:
        # Only a process outside may map a second user.
        code = 1
        try:
            os.read(ready[0], 1)
            for file, host in (("uid_map", uid), ("gid_map", gid)):
                lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if uid == 0 else f"{NOBODY} {host} 1\n"
                if uid != 0 and file == "gid_map":
                    write_text(f"/proc/{watcher}/setgroups", "deny")
                write_text(f"/proc/{watcher}/{file}", lines)
            code = 0
        finally:
            os._exit(code)
    try:
        call_libc("unshare", NAMESPACES)
    finally:
        os.write(ready[1], b"1")
        _, status = os.waitpid(helper, 0)
        for end in ready:
            os.close(end)
    if status != 0:
        raise OSError(EPERM, "the users of the namespace cannot be mapped")


def write_text(path: str, text: str) -> None:
    """Write a file of the kernel by one system call."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def watch_init(libraries: list[str], command: list[str], limits: dict[str, int]) -> bytes:
    """Start init and wait for it up to the limit; return the status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKING)
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, f"no seccomp filter is known for {machine}")
    enter_user_namespace()
    reader, writer = os.pipe()
    deadline = time.monotonic() + limits["wall_ms"] / 1000
    init = os.fork()
    if init == 0:
        os.close(reader)
        try:
            run_init(writer, libraries, command, limits)
        finally:
            os._exit(0)
    os.close(writer)
    is_over = False
    while not is_over and os.waitpid(init, os.WNOHANG)[0] == 0:
        woken = signal.sigtimedwait(WAKING, max(0.0, deadline - time.monotonic()))
        # A batch system's SIGTERM to every process must not become a verdict.
        is_over = woken is None or (
            woken.si_signo == signal.SIGTERM and woken.si_pid == os.getppid()
        )
    if is_over:
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)  # returns when nothing of the namespace is left
    status = os.read(reader, 4096)
    if is_over:
        return b"timeout"
    return status or b"refused init ended without a status"


def refusal_line(error: OSError) -> bytes:
    """Format the reason why nothing was run, in one line."""
    return b"refused " + " ".join(str(error).split()).encode()


def main() -> None:
    """Run the command and report its end."""
    parent = int(sys.argv[1])
    status_fd = int(sys.argv[2])
    divide = sys.argv.index("--")
    arguments = sys.argv[3:divide]
    pairs = [word.partition("=") for word in arguments if not word.startswith("/")]
    limits = {name: int(value) for name, _, value in pairs}
    libraries = [word for word in arguments if word.startswith("/")]
    os.set_inheritable(status_fd, False)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    try:
        status = watch_init(libraries, sys.argv[divide + 1 :], limits)
    except OSError as error:
        status = refusal_line(error)
    os.write(status_fd, status + b"\n")
    os._exit(0)  # nothing is left to tidy, which would take some milliseconds
