"""Where a run listens, as this host binds it and as others reach it; the interfaces that lead there."""

import socket

import pytest

from prefixrl.common.errors import ConfigError
from prefixrl.common.wire import interfaces
from prefixrl.common.wire.address import (
    advertised,
    beside,
    bindable,
    is_loopback,
    is_on_this_host,
    weights_listen,
)


@pytest.mark.parametrize(
    ("listen", "bound"),
    [
        pytest.param("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", id="loopback"),
        pytest.param("tcp://10.0.0.7:5555", "tcp://10.0.0.7:5555", id="an address"),
        pytest.param("tcp://*:5555", "tcp://0.0.0.0:5555", id="every interface"),
        pytest.param("tcp://lo:5555", "tcp://127.0.0.1:5555", id="an interface"),
        pytest.param("tcp://localhost:0", "tcp://127.0.0.1:0", id="a name"),
        pytest.param("ipc:///tmp/x", "ipc:///tmp/x", id="a file"),
    ],
)
def test_an_interface_or_a_name_stands_for_its_address(listen: str, bound: str) -> None:
    assert bindable(listen) == bound


def test_what_is_neither_address_nor_interface_nor_name_is_refused_with_the_interfaces_that_are_there() -> (
    None
):
    with pytest.raises(
        ConfigError,
        match=r"broker\.listen = 'tcp://eth99\.invalid:0'.*no interface of this host \(.*lo",
    ):
        bindable("tcp://eth99.invalid:0")


@pytest.mark.parametrize(
    ("listen", "weights"),
    [
        pytest.param("tcp://0.0.0.0:0", "tcp://0.0.0.0:0", id="a free port"),
        pytest.param("tcp://10.0.0.7:5555", "tcp://10.0.0.7:5556", id="a fixed port"),
        pytest.param("ipc:///tmp/x", "ipc:///tmp/x.weights", id="a file"),
    ],
)
def test_weights_have_a_free_port_or_the_one_after_a_fixed_one(listen: str, weights: str) -> None:
    assert weights_listen(listen) == weights


def test_the_last_port_leaves_none_for_the_weights() -> None:
    with pytest.raises(ConfigError, match="weights need the port after it"):
        weights_listen("tcp://10.0.0.7:65535")


def test_every_interface_is_advertised_by_the_name_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert advertised("tcp://0.0.0.0:5555") == "tcp://localhost:5555"
    assert advertised("tcp://10.0.0.7:5555") == "tcp://10.0.0.7:5555"


def test_a_name_that_is_unknown_here_is_not_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(ConfigError, match="listen on an address of this host instead"):
        advertised("tcp://0.0.0.0:5555")


def test_weights_are_reached_at_the_host_at_which_the_broker_is() -> None:
    assert beside("tcp://0.0.0.0:5556", "tcp://node7:5555") == "tcp://node7:5556"
    assert beside("ipc:///tmp/x.weights", "ipc:///tmp/x") == "ipc:///tmp/x.weights"


def test_an_address_of_every_host_reaches_no_other_one() -> None:
    assert is_loopback("127.1.2.3") and is_loopback("localhost") and not is_loopback("node7")
    assert is_on_this_host("tcp://127.0.0.1:1") and is_on_this_host("ipc:///tmp/x")
    assert not is_on_this_host("tcp://node7:1") and not is_on_this_host("tcp://10.0.0.7:1")


def test_the_interface_towards_a_host_is_the_one_with_the_address_of_the_way_there() -> None:
    assert "lo" in interfaces.names() and interfaces.address_of("lo") == "127.0.0.1"
    assert interfaces.address_of("eth99") is None
    for name in interfaces.names():
        address = interfaces.address_of(name)
        if address is not None and not is_loopback(address):
            assert interfaces.towards(address) == name
    assert interfaces.towards("no-such-host.invalid") is None
