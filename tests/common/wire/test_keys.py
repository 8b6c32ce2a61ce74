"""The keys of a run: their files, and who is let in with which of them, over real sockets."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixrl.common.errors import ConfigError, PeerLost, Refusal
from prefixrl.common.wire import keys
from prefixrl.common.wire.messages.learner import FromBroker, GetStatus, ToBroker
from prefixrl.common.wire.transport import Client, Server, Unlisted
from support.fakes import wait_until
from support.runs.no_descriptor import no_descriptor

Work = Server[ToBroker, FromBroker]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    keys.make_keys(tmp_path)
    return tmp_path


@pytest.fixture
def server(run: Path) -> Iterator[Work]:
    opened: Work = Server("tcp://127.0.0.1:0", ToBroker, keys.server_keys(run))
    yield opened
    opened.close()


def connect(server: Work, directory: Path, name: str = "worker") -> Client[FromBroker, ToBroker]:
    return Client(
        server.endpoint,
        FromBroker,
        b"one",
        keys.read_client_key(keys.client_key_file(directory, name)),
    )


def test_a_run_has_keys_for_every_role_that_only_its_user_can_read(run: Path) -> None:
    folder = run / keys.KEYS_FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")}
    assert modes == dict.fromkeys(["server.key", "worker.key", "rank.key", "operator.key"], 0o600)
    assert [(each.name, each.role) for each in keys.clients(run)] == [
        (role, role) for role in keys.ROLES
    ]


def test_keys_that_are_there_stay(run: Path) -> None:
    before = {path: path.read_bytes() for path in (run / keys.KEYS_FOLDER).iterdir()}
    keys.make_keys(run)
    assert {path: path.read_bytes() for path in (run / keys.KEYS_FOLDER).iterdir()} == before


def test_the_owner_of_a_key_is_known_with_every_message(run: Path, server: Work) -> None:
    keys.add_client(run, "node-7")
    for name, role in (("worker", "worker"), ("operator", "operator"), ("node-7", "worker")):
        client = connect(server, run, name)
        client.send(GetStatus())
        received = server.receive(20.0)
        assert received is not None and received.client is not None
        assert (received.client.name, received.client.role) == (name, role)
        client.close()


def refused(client: Client[FromBroker, ToBroker]) -> str:
    try:
        with pytest.raises(Refusal) as error:
            for _ in range(20):
                try:
                    client.send(GetStatus(), timeout_s=1.0)
                except PeerLost:
                    continue
        return str(error.value)
    finally:
        client.close()


def test_a_key_that_was_removed_is_refused_by_name(run: Path, server: Work) -> None:
    keys.add_client(run, "node-7")
    key = keys.read_client_key(keys.client_key_file(run, "node-7"))
    keys.remove_client(run, "node-7")
    assert "'node-7'" in refused(Client(server.endpoint, FromBroker, b"one", key))


def test_a_key_of_another_role_is_refused_where_only_workers_come(run: Path) -> None:
    server: Work = Server("tcp://127.0.0.1:0", ToBroker, keys.server_keys(run, "worker"))
    assert "role operator" in refused(connect(server, run, "operator"))
    server.close()


def test_a_key_comes_and_goes_while_the_server_runs(run: Path, server: Work) -> None:
    keys.add_client(run, "node-7")
    client = connect(server, run, "node-7")
    client.send(GetStatus())
    assert server.receive(20.0) is not None
    keys.remove_client(run, "node-7")
    client.send(GetStatus())
    with pytest.raises(Unlisted) as error:
        server.receive(20.0)
    assert error.value.peer == b"one"
    client.close()


def test_what_listens_there_without_the_runs_key_gets_nothing(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    keys.make_keys(other)
    false: Work = Server("tcp://127.0.0.1:0", ToBroker, keys.server_keys(other))
    client = Client[FromBroker, ToBroker](
        false.endpoint,
        FromBroker,
        b"one",
        keys.read_client_key(keys.client_key_file(run, "worker")),
    )
    wait_until(lambda: "does not hold the run's key" in client.why_not(), "the failed handshake")
    with pytest.raises(PeerLost, match="does not hold the run's key"):
        client.send(GetStatus(), timeout_s=0.5)
    assert false.receive(0.2) is None
    client.close()
    false.close()


def test_without_a_key_nothing_arrives(server: Work) -> None:
    stranger: Client[FromBroker, ToBroker] = Client(server.endpoint, FromBroker, b"one", None)
    with pytest.raises(PeerLost):
        stranger.send(GetStatus(), timeout_s=1.0)
    assert server.receive(0.2) is None
    stranger.close()


def test_a_local_endpoint_needs_no_key(run: Path) -> None:
    door = f"ipc://{run}/door"
    server: Work = Server(
        "tcp://127.0.0.1:0", ToBroker, keys.server_keys(run, "worker"), local_endpoint=door
    )
    client: Client[FromBroker, ToBroker] = Client(door, FromBroker, b"one", None)
    client.send(GetStatus())
    received = server.receive(20.0)
    assert received is not None and received.client is None
    client.close()
    server.close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(run: Path, mode: int) -> None:
    path = keys.client_key_file(run, "worker")
    path.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"other users can read the key {path} .mode 0{mode:o}.: `chmod 600"
    ):
        keys.read_client_key(path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"name": 1}', b"\xff\xfe", b'{"public": "short", "secret": "x"}']
)
def test_a_file_that_is_no_key_is_named(run: Path, content: bytes) -> None:
    path = keys.client_key_file(run, "worker")
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} is no key of a run"):
        keys.read_client_key(path)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no key .*prefixrl keygen"):
        keys.read_client_key(keys.client_key_file(tmp_path, "worker"))


@pytest.mark.parametrize("name", ["", "../x", "server", "a b", "x" * 65, ".hidden", "a\n"])
def test_a_name_that_is_no_file_name_is_refused(run: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a key's name has"):
        keys.add_client(run, name)


def test_a_slip_in_the_list_locks_nobody_out(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = keys.ClientList(run)
    role: keys.KeyRole = "rank"
    public = keys.read_client_key(keys.client_key_file(run, role)).pair.public
    actual = listed.find_client(public)
    (run / keys.KEYS_FOLDER / "clients").write_text("oops\n")
    assert actual is not None and listed.find_client(public) == actual
    assert "line 1: 'oops' is not NAME ROLE PUBLIC_KEY" in caplog.text


def test_a_list_that_could_not_be_read_for_a_moment_is_read_again(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = keys.ClientList(run)
    assert listed.find_client(keys.read_client_key(keys.client_key_file(run, "worker")).pair.public)
    public = keys.read_client_key(keys.add_client(run, "late")).pair.public
    with no_descriptor():
        assert [listed.find_client(public) for _ in range(3)] == [None] * 3
    actual = listed.find_client(public)
    assert actual is not None and actual.name == "late"
    assert "the list of keys cannot be read and stays as it was: [Errno 24]" in caplog.text


def test_a_name_is_given_once(run: Path) -> None:
    keys.add_client(run, "node-7")
    with pytest.raises(ConfigError, match="--remove node-7"):
        keys.add_client(run, "node-7")
    keys.remove_client(run, "node-7")
    keys.add_client(run, "node-7")
    with pytest.raises(ConfigError, match=r"no key named 'node-8'; it lists .*node-7"):
        keys.remove_client(run, "node-8")
