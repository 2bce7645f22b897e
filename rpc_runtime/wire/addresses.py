"""Addresses of workers and trackers, and the one parser of HOST:PORT."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, replace

from rpc_runtime.errors import InputError

_NAME = re.compile(r"[^\s\[\]/:@?#%]+")


@dataclass(frozen=True)
class Address:
    """A host and a port; ``str`` writes them as HOST:PORT, with an IPv6 host in brackets.

    ``host`` is a name or a numeric address, without brackets. Port 0 is any free port, for a server.

    Raises:
        InputError: the host or the port is invalid.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host.isprintable() or not (_NAME.fullmatch(self.host) or _numeric_version(self.host) == 6):
            raise InputError(f"a host is a name or a numeric address without brackets, got {self.host!r}")
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"a port is a number from 0 to 65535, got {self.port}")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address written as HOST:PORT, with an IPv6 host in brackets.

        Raises:
            InputError: the text is not a valid address; the message says how to write it, if that is known.
        """
        host, _, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if (bare != host) == (_numeric_version(bare) == 6) and port.isascii() and port.isdigit():
            try:
                return cls(bare, int(port))
            except InputError:
                pass
        raise InputError(f"an address is HOST:PORT with a port from 0 to 65535, got {text!r}{_advice(text)}")

    @classmethod
    def callable(cls, text: str) -> Address:
        """Return the address to call, parsed as by `parse`; raise `InputError` also for port 0."""
        address = cls.parse(text)
        if address.port == 0:
            raise InputError(f"nobody listens on port 0, as {text!r} says")
        return address

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def numeric(self) -> Address:
        """This address, with 127.0.0.1 instead of ``localhost``: on ::1 another user may listen on the same port."""
        return replace(self, host="127.0.0.1") if self.host.lower() == "localhost" else self

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on the same host can reach this address."""
        if not _numeric_version(self.host):
            return self.host == "localhost"
        address = ipaddress.ip_address(self.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    @property
    def is_unspecified(self) -> bool:
        """Whether this is the address of all interfaces of a host, such as 0.0.0.0."""
        return bool(_numeric_version(self.host)) and ipaddress.ip_address(self.host).is_unspecified

    @property
    def from_here(self) -> Address:
        """The address at which a process on the same host calls a server that listens here."""
        loopback = {4: "127.0.0.1", 6: "::1"}[_numeric_version(self.host)] if self.is_unspecified else self.host
        return replace(self, host=loopback)

    def listen(self) -> socket.socket:
        """Return a socket that listens on this address. Raises OSError."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server((self.host, self.port), family=family)

    def connect(self, timeout_seconds: float) -> socket.socket:
        """Return a socket that is connected to this address. Raises OSError."""
        return socket.create_connection((self.host, self.port), timeout_seconds)


def _numeric_version(host: str) -> int:
    """Return the IP version of a numeric address, 4 or 6; 0 for a host name."""
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return 0


def _advice(text: str) -> str:
    """Return the last part of the message about an invalid address: how to write it, if that is known."""
    scheme, is_url, rest = text.partition("://")
    if is_url:
        return f"; write it without {scheme}://, as {rest.partition('/')[0]}"
    host, _, port = text.rpartition(":")
    if _numeric_version(host) == 6:
        return f"; an IPv6 host is written in brackets: [{host}]:{port}"
    if _numeric_version(text.strip("[]")) == 6:
        return f"; an IPv6 host is written in brackets: [{text.strip('[]')}]:PORT"
    return ""
