"""Sentences that say which transport carries which links."""

from __future__ import annotations

from collections.abc import Iterable

from rpc_runtime.transports.transport import TRANSPORTS, transport_named
from tvm_split.units import short_list


def transport_lines(links: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each transport with its links, which are given as (source, destination, transport).

    Two directions with the same transport are one entry. Links with an unknown (empty) transport are left out.
    """
    transports = {(source, destination): transport for source, destination, transport in links if transport}
    ends: dict[str, list[str]] = {}
    listed = set()
    for (source, destination), transport in transports.items():
        both_ways = transports.get((destination, source)) == transport
        if not (both_ways and (destination, source) in listed):
            ends.setdefault(transport, []).append(f"{source} {'↔' if both_ways else '→'} {destination}")
            listed.add((source, destination))
    return [f"Links over {_title(name)}: {short_list(pairs)}" for name, pairs in ends.items()]


def _title(transport: str) -> str:
    """Return a transport's title, or its name if the package that adds it is not installed here."""
    return transport_named(transport).title if transport in TRANSPORTS else transport
