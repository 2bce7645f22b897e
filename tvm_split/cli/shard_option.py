"""``--shard``: from one text to the layers that several machines compute together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast, get_args

from tvm_split.cli.options import WrongUseError

if TYPE_CHECKING:
    from tvm_split.planner.shard import Shard

FORM = "FIRST..LAST:AXIS:MACHINE=SHARE,MACHINE=SHARE[:EXCHANGE]"
BETWEEN = ".."
OPTION = "--shard"


def shard_of(text: str, layers: Sequence[str]) -> Shard:
    """What a text in the `FORM` says of a model with these layers; a layer alone is the first and the last.

    Names may have colons, slashes and dots in them: the axis is sought from the end, and of several ways to part the
    layers' names the one counts whose two ends the model has.

    Raises:
        WrongUseError: the text has another form, or an axis, a share or an exchange that there cannot be.
    """
    from tvm_split.planner.problem import Axis, Exchange
    from tvm_split.planner.shard import Shard

    axes, exchanges = get_args(Axis), get_args(Exchange)
    found = re.fullmatch(rf"(.+):({'|'.join(axes)}):(.*=[^:]*?)(?::([^:=]*))?", text, re.DOTALL)
    if found is None:
        known = f"AXIS is {', '.join(axes)}; EXCHANGE {' or '.join(exchanges)}"
        raise WrongUseError(f"{text!r} is not {FORM} ({known})", OPTION)
    names, axis, shares, exchange = found.groups()
    if exchange is not None and exchange not in exchanges:
        raise WrongUseError(f"{text!r} has the exchange {exchange!r}; it can be {' or '.join(exchanges)}", OPTION)
    first, last = _ends(names, layers)
    return Shard(first, last, cast(Axis, axis), _shares(text, shares), cast(Exchange, exchange or exchanges[0]))


def _ends(names: str, layers: Sequence[str]) -> tuple[str, str]:
    from tvm_split.planner.by_hand import covers

    def is_known(name: str) -> bool:
        return any(covers(name, layer) for layer in layers)

    places = [each.start() for each in re.finditer(f"(?={re.escape(BETWEEN)})", names)]
    parted = [(names[:place].strip(), names[place + len(BETWEEN) :].strip()) for place in places]
    ways = [*parted, (names.strip(), names.strip())]
    return next((way for way in ways if all(map(is_known, way))), ways[0])


def _shares(text: str, given: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in given.split(","):
        machine, separator, share = (part.strip() for part in each.rpartition("="))
        if not (machine and separator):
            raise WrongUseError(f"{text!r} has {each!r}, which is not MACHINE=SHARE", OPTION)
        if machine in found:
            raise WrongUseError(f"{text!r} has two shares for {machine!r}; give it their sum", OPTION)
        try:
            found[machine] = float(share)
        except ValueError:
            raise WrongUseError(
                f"{text!r} gives {machine!r} {share!r}, which is no share, like 0.5, of the whole", OPTION
            ) from None
    return found
