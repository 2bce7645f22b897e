"""HOST:PORT is read in one way; a wrong text is refused with the right one."""

import pytest

from rpc_runtime.errors import InputError
from rpc_runtime.wire.addresses import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.0.2.1:65535", "192.0.2.1", 65535),
        ("[2001:db8::1]:0", "2001:db8::1", 0),
        ("[fe80::1%eth0]:7001", "fe80::1%eth0", 7001),
        ("box_1.lab.example:7001", "box_1.lab.example", 7001),
    ],
)
def test_addresses_are_written_as_they_are_read(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address(host, port)) == text


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        *((text, "") for text in ("", "box", ":7001", "box:", "box:65536", "box:-1", "box: 7", "box:\u0667", "box:x")),
        *((text, "") for text in ("[box]:7001", "[192.0.2.1]:7001", "a b:1", "me@box:7001", "box/a:7001", "dns:box:1")),
        ("::1:7312", "in brackets: [::1]:7312"),
        ("2001:db8::1:7312", "in brackets: [2001:db8::1]:7312"),
        ("2001:db8::abcd", "in brackets: [2001:db8::abcd]:PORT"),
        ("[::1]", "in brackets: [::1]:PORT"),
        ("http://box:7001/status", "without http://, as box:7001"),
        ("grpc://[::1]:7001", "without grpc://, as [::1]:7001"),
    ],
)
def test_what_is_no_address(text: str, advice: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT with a port from 0 to 65535") as refused:
        Address.parse(text)
    assert str(refused.value).endswith(advice)


def test_nobody_calls_port_0() -> None:
    assert Address.callable("box:1").port == 1
    with pytest.raises(InputError, match="nobody listens on port 0, as 'box:0' says"):
        Address.callable("box:0")


def test_hosts_on_loopback_and_all_addresses() -> None:
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.2"):
        assert Address(host, 1).is_loopback
    for host in ("::ffff:192.0.2.1", "0.0.0.0", "::", "192.0.2.1", "localhost.example"):
        assert not Address(host, 1).is_loopback
    calls = {"0.0.0.0": "127.0.0.1", "::": "::1", "0:0::": "::1", "192.0.2.1": "192.0.2.1", "box": "box"}
    assert {host: Address(host, 1).from_here.host for host in calls} == calls
