"""Hosts on one machine: network namespaces on a bridge that stands in a namespace of its own.

A namespace lives as long as the process that holds it, which dies with the tests: nothing is added to the machine's
own network, and nothing is left behind, however the tests end.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prefixrl.common.host.process import PARENT_VARIABLE
from support.fakes import end
from support.runs.run_helper import wait_for

NEEDED = ("ip", "tcpdump", "nsenter", "unshare", "setpriv", "mount", "wg", "wireguard-go")
SUBNET, TUNNEL = "10.99.0", "10.98.0"
"""Addresses on the bridge, and in the tunnel between hosts that need one."""
TUNNEL_PORT = 51820
_HIDE = (
    'while [ "$1" != -- ]; do mount -t tmpfs -o mode=700 none "$1"; shift; done; shift; exec "$@"'
)
_TUNNEL = "mount -t tmpfs none /run && mkdir /run/wireguard && exec wireguard-go -f wg0"
Process = subprocess.Popen[bytes]


def why_it_cannot_run() -> str:
    """The reason why no such hosts can be made here, "" where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [each for each in NEEDED if shutil.which(each) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; `make hosts` installs them with apt as root"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


class Namespace:
    """A network namespace, and the processes that were started in it."""

    def __init__(self) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        self._holder = subprocess.Popen(command)
        self.pid = self._holder.pid
        wait_for(self._is_made, "a network namespace", 20.0)
        self.processes: list[Process] = []
        self.run("ip", "link", "set", "lo", "up")

    def _is_made(self) -> bool:
        assert self._holder.poll() is None, "no network namespace can be made"
        with suppress(OSError):
            return os.readlink(f"/proc/{self.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        return False

    @property
    def entry(self) -> list[str]:
        """The command that runs another one here."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, *command: str) -> str:
        """A command's output."""
        done = subprocess.run([*self.entry, *command], capture_output=True, text=True, timeout=60.0)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start(
        self,
        command: Sequence[str],
        log: Path,
        variables: dict[str, str] | None = None,
        hidden: Sequence[Path] = (),
        cwd: Path | None = None,
    ) -> Process:
        """Start a process that dies with the tests and does not see the `hidden` folders."""
        hide = (
            ["unshare", "--mount", "sh", "-ec", _HIDE, "sh", *map(str, hidden), "--"]
            if hidden
            else []
        )
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **(variables or {})}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.entry, *hide, *command],
                env=environment,
                stdout=output,
                stderr=output,
                cwd=cwd,
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        """End everything here, at once."""
        for process in (*self.processes, self._holder):
            end(process)


class Host(Namespace):
    """A namespace with one interface, eth0."""

    def __init__(self, switch: Namespace, number: int) -> None:
        super().__init__()
        self._switch, self._link = switch, f"v{number}"
        self.address = f"{SUBNET}.{number}"
        switch.run(
            *(
                "ip",
                "link",
                "add",
                self._link,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(self.pid),
            )
        )
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        switch.run("ip", "link", "set", self._link, "master", "br0", "up")

    def cut(self) -> None:
        """Cut the link: no packet comes or goes, and nobody is told."""
        self._switch.run("ip", "link", "set", self._link, "down")

    def mend(self) -> None:
        """Mend the link."""
        self._switch.run("ip", "link", "set", self._link, "up")

    def die(self) -> None:
        """End like a host whose power fails: no packet says that it is gone."""
        self.cut()
        self.close()


class Network:
    """Hosts that are numbered from 1, and what crosses the bridge between them."""

    def __init__(self, hosts: int) -> None:
        self.switch = Namespace()
        self.switch.run(
            "ip", "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0"
        )
        self.switch.run("ip", "link", "set", "br0", "up")
        self.hosts: list[Host] = []
        for _ in range(hosts):
            self.add()

    def add(self) -> Host:
        """One more host."""
        self.hosts.append(Host(self.switch, len(self.hosts) + 1))
        return self.hosts[-1]

    def tunnel(self, *hosts: Host, log: Path) -> list[str]:
        """Join hosts by WireGuard; their addresses in the tunnel."""
        secrets = [host.run("wg", "genkey") for host in hosts]
        publics = [
            subprocess.run(["wg", "pubkey"], input=each, capture_output=True, text=True).stdout
            for each in secrets
        ]
        addresses = [f"{TUNNEL}.{number + 1}" for number in range(len(hosts))]
        for number, host in enumerate(hosts):
            daemon = host.start(
                ["unshare", "--mount", "sh", "-ec", _TUNNEL],
                log,
                {"WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD": "1"},
            )
            inside = ["nsenter", f"--mount=/proc/{daemon.pid}/ns/mnt"]
            wait_for(lambda: self._is_there(host, inside), "the tunnel's interface", 20.0)  # noqa: B023
            key = log.with_name(f"tunnel-{number}.key")
            key.write_text(secrets[number])
            peers: list[str] = []
            for other, public in enumerate(publics):
                if other != number:
                    place = f"{hosts[other].address}:{TUNNEL_PORT}"
                    peers += [
                        "peer",
                        public.strip(),
                        "endpoint",
                        place,
                        "allowed-ips",
                        f"{addresses[other]}/32",
                    ]
            host.run(
                *inside,
                "wg",
                "set",
                "wg0",
                "private-key",
                str(key),
                "listen-port",
                str(TUNNEL_PORT),
                *peers,
            )
            host.run("ip", "addr", "add", f"{addresses[number]}/24", "dev", "wg0")
            host.run("ip", "link", "set", "wg0", "up")
        return addresses

    @staticmethod
    def _is_there(host: Host, inside: list[str]) -> bool:
        return (
            subprocess.run(
                [*host.entry, *inside, "wg", "show", "wg0"], capture_output=True
            ).returncode
            == 0
        )

    def close(self) -> None:
        """End all hosts."""
        for namespace in (*self.hosts, self.switch):
            namespace.close()


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Hosts that are gone afterwards."""
    made = Network(hosts)
    try:
        yield made
    finally:
        made.close()
