"""Links in sentences: what carries which."""

from __future__ import annotations

from collections.abc import Iterable

from rpc_runtime.transports.transport import TRANSPORTS, transport_named
from tvm_split.units import short_list


def transport_lines(links: Iterable[tuple[str, str, str]]) -> list[str]:
    """A line for each transport, of links as (source, destination, transport); both ways as one where they are alike.

    Links of which the transport is not known (empty) are left out.
    """
    known = {(source, destination): transport for source, destination, transport in links if transport}
    ends: dict[str, list[str]] = {}
    listed = set()
    for (source, destination), transport in known.items():
        both_ways = known.get((destination, source)) == transport
        if not (both_ways and (destination, source) in listed):
            ends.setdefault(transport, []).append(f"{source} {'↔' if both_ways else '→'} {destination}")
            listed.add((source, destination))
    return [f"Links over {_title(name)}: {short_list(pairs)}" for name, pairs in ends.items()]


def _title(transport: str) -> str:
    """In a sentence; that of a package which is not installed here by its name."""
    return transport_named(transport).title if transport in TRANSPORTS else transport
