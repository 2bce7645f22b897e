"""How fast a plan can be at most, however many machines there are: by what the client sends to a stage, and gets."""

from __future__ import annotations

import math

import numpy as np

from tvm_split.planner.search.instance import Instance


def client_bound(instance: Instance) -> float:
    """A lower bound on the period of every plan: each piece's tensors from the client, and to it, over the best link.

    A stage gets all that the client sends to any of its pieces, and replicas are charged all of it, too.
    """
    client = instance.client
    given, taken = np.zeros(len(instance.pieces)), np.zeros(len(instance.pieces))
    for tensor in instance.tensors:
        if tensor.source == client:
            given[[piece for piece in tensor.destinations if piece != client]] += tensor.bytes
        elif client in tensor.destinations:
            taken[tensor.source] += tensor.bytes
    able = np.isfinite(instance.seconds)
    found = 0.0
    for sizes, slow in ((given, instance.seconds_per_byte[-1, :-1]), (taken, instance.seconds_per_byte[:-1, -1])):
        for piece in np.flatnonzero(sizes):
            found = max(found, float(sizes[piece] * slow[able[piece]].min(initial=math.inf)))
    return found
