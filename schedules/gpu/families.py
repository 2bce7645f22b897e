"""What a legalization and the schedule of its kernel agree on: annotations of blocks, and limits that both apply."""

from __future__ import annotations

TILED = "tiled "
"""Anchors of tiled contractions are named with this prefix and the operator's name: ``tiled conv2d``."""
TENSOR_CORE = "tensor_core"
FEW_ROWS = "few_rows"
DEPTHWISE = "depthwise_conv2d"
TILE = "tvm_split.tile"
"""On a tiled anchor: the name of its tile in `schedules.gpu.tile.TILES`."""
FETCH = "tvm_split.fetch_lanes"
"""On an operand's view: how many of its elements one load may take."""
DEPTH_FIRST = "tvm_split.depth_first"
"""On an operand's view: 1 where neighbours in memory are neighbours in the sum, and threads should take them so."""
STORE = "tvm_split.store_lanes"
"""On a tiled anchor: how many results of one row one store may take."""
VECTORS = (4, 2, 1)
"""Elements of one load or store, the best first."""
MOST_ROWS = 4
"""Products of up to this many rows are bound by reading the right operand once."""
TENSOR_CORE_SMALLEST = 16
"""Tensor cores take products all of whose extents fill a fragment at least."""
