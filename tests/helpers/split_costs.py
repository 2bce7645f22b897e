"""The costs of a split inside a layer: bytes between machines, repeated computation, and weights."""

from collections.abc import Mapping
from math import prod

import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import (
    main_function,
    operations_of,
    returned_fields,
    used_variables,
)
from relay_passes.sharding.region import Region, Sharded, part_name


def transfer_bytes(sharded: Sharded) -> dict[tuple[str | None, str | None], int]:
    """Return the bytes per micro-batch that are sent from one machine to another; a value is sent once to each.

    None as the source stands for values from before the region or from a slice, None as the destination for a gather or
    what follows the region.
    """
    function = main_function(sharded.module)
    readers = [(sharded.machine_of.get(operation.var.name), operation.value) for operation in operations_of(function)]
    readers += [(None, field) for field in returned_fields(function)]
    sizes: dict[tuple[str, str | None, str | None], int] = {}
    for reader, value in readers:
        for used in used_variables(value):
            source = sharded.machine_of.get(used.name)
            if source != reader:
                sizes[used.name, source, reader] = _bytes(used.ty)
    sent: dict[tuple[str | None, str | None], int] = {}
    for (_, source, reader), size in sizes.items():
        sent[source, reader] = sent.get((source, reader), 0) + size
    return sent


def computed_again(sharded: Sharded, region: Region, module: tvm.IRModule) -> Mapping[str, int]:
    """Return, for each variable of the region, the number of elements that are computed again, counted each time.

    ``module`` is the graph before the split.
    """
    parts = {operation.var.name: operation.var.ty for operation in operations_of(main_function(sharded.module))}
    extra_elements = {}
    for whole in operations_of(main_function(module)):
        name = whole.var.name
        part_types = [
            parts[part] for part in (part_name(name, machine) for machine in region.machines) if part in parts
        ]
        if name in region.names and part_types:
            extra_elements[name] = sum(_elements(part_type) for part_type in part_types) - _elements(whole.var.ty)
    return extra_elements


def _elements(kind: relax.Type) -> int:
    return prod(int(length) for length in (kind.fields[0] if isinstance(kind, relax.TupleType) else kind).shape.values)


def _bytes(kind: relax.Type) -> int:
    if isinstance(kind, relax.TupleType):
        return sum(_bytes(field) for field in kind.fields)
    return _elements(kind) * np.dtype(str(kind.dtype.dtype)).itemsize
