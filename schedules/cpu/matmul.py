"""Lay out, lower and schedule relax.matmul with its right operand in column blocks, ``[N / lanes, K, lanes]``."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import mutator

from schedules.blocks import ANCHOR
from schedules.cpu.contraction import ALL_AT_ONCE, BLOCKS_OUTSIDE, LoopRoles, Tiling, contraction_template
from schedules.cpu.register_tile import dividing_tile, divisors, padded_blocks, padded_extent
from schedules.relax_tools import (
    FUSABLE,
    TraitsMutator,
    accumulator_dtype,
    array_of,
    broadcast_index,
    constant,
    operator_of,
    static_shape,
)
from schedules.traits import Traits
from schedules.views import view_of

FAMILY = "matmul_packed"
VIEWS = ("relax.permute_dims", "relax.broadcast_to", "relax.reshape")
# Measured on 128 rows: chunks gain 4 % at a depth of 3072 and lose 2 % at 768, where the sums go to memory needlessly.
DEPTH_IN_ONE_PASS = 1024
DEPTH_OF_CHUNK = 256
SMALLEST_CHUNK = 64
SMALLEST_REUSE = 4


@mutator
class PackMatmul(TraitsMutator):
    """Make matrix products read views in place, and pack constant right operands as [N / lanes, K, lanes]."""

    def __init__(self, module: tvm.IRModule, traits: Traits) -> None:
        super().__init__(module, traits)
        self._packed: dict[tuple[Any, ...], relax.Expr] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != "relax.matmul":
            return call
        left, right = call.args
        left_shape, right_shape = static_shape(left), static_shape(right)
        if left_shape is None or right_shape is None or len(left_shape) < 2 or 0 in (*left_shape, *right_shape):
            return call
        matrix = self._constant(right)
        # A matrix that the importer broadcast over the batch is still one matrix; numpy gives it zero strides.
        while matrix is not None and matrix.ndim > 2 and (matrix.shape[0] == 1 or matrix.strides[0] == 0):
            matrix = matrix[0]
        # Rows of the left operand are read one element of a run after the other, for many columns at once.
        left_view = view_of(left, self.lookup_binding, smallest_run=self.traits.lanes)
        dtype = str(call.ty.dtype)
        if matrix is not None and matrix.ndim == 2 and len(right_shape) <= len(left_shape):
            return self._product(
                lambda a, b: matmul_packed(left_view.tensor(a), b, right_shape[-1], dtype, self.traits),
                left_view.source,
                self._pack(matrix, left_shape[-2]),
            )
        if len(right_shape) < 2 or matrix is not None:
            return call
        right_view = view_of(right, self.lookup_binding)
        if left_view.is_copy and right_view.is_copy:
            return call
        return self._product(
            lambda a, b: matmul_with_packing(left_view.tensor(a), right_view.tensor(b), dtype, self.traits),
            left_view.source,
            right_view.source,
        )

    def _product(self, compute: Callable[..., te.Tensor], left: relax.Expr, right: relax.Expr) -> relax.Expr:
        return self.builder_.call_te(compute, left, right, primfunc_name_hint="matmul", primfunc_attrs=FUSABLE)

    def _constant(self, expression: relax.Expr) -> Any:
        """Return the numpy array of a constant or of a view of one; None for other expressions."""
        if isinstance(expression, relax.Var):
            bound = self.lookup_binding(expression)
            return None if bound is None else self._constant(bound)
        if isinstance(expression, tvm.ir.GenericConst):
            return array_of(expression)
        name, shape = operator_of(expression), static_shape(expression)
        if shape is None or name not in VIEWS:
            return None
        source = self._constant(expression.args[0])
        if source is None:
            return None
        if name == "relax.permute_dims":
            axes = expression.attrs.axes
            return source.transpose(None if axes is None else [int(axis) for axis in axes])
        if name == "relax.broadcast_to":
            return np.broadcast_to(source, shape)
        if source.shape == shape:
            return source
        # numpy's reshape may copy, and then the zero strides of a broadcast are lost.
        return source.reshape(shape) if 0 not in source.strides else None

    def _pack(self, matrix: Any, rows: int) -> relax.Expr:
        (depth, columns), lanes = matrix.shape, self.traits.lanes
        blocks = padded_blocks(rows, -(-columns // lanes), self.traits)
        key = (matrix.__array_interface__["data"][0], matrix.shape, matrix.strides, blocks)
        if key not in self._packed:
            added = blocks * lanes - columns
            padded = np.pad(matrix, ((0, 0), (0, added))) if added else matrix
            packed = padded.reshape(depth, blocks, lanes).transpose(1, 0, 2)
            self._packed[key] = constant(np.ascontiguousarray(packed))
        return self._packed[key]


def matmul_with_packing(left: te.Tensor, right: te.Tensor, out_dtype: str, traits: Traits) -> te.Tensor:
    """Return the product of left [..., M, K] and right [..., K, N], packed at run time; batch axes are broadcast."""
    batch = [int(extent) for extent in right.shape[:-2]]
    depth, columns = int(right.shape[-2]), int(right.shape[-1])
    lanes = traits.lanes
    blocks = padded_blocks(int(left.shape[-2]), -(-columns // lanes), traits)

    def element(*index: Any) -> Any:
        *at, block, k, lane = index
        column = block * lanes + lane
        if blocks * lanes > columns:
            column = tirx.min(column, columns - 1)
        return right[(*at, k, column)]

    packed = te.compute((*batch, blocks, depth, lanes), element, name="pack")
    return matmul_packed(left, packed, columns, out_dtype, traits)


def matmul_packed(left: te.Tensor, packed: te.Tensor, columns: int, out_dtype: str, traits: Traits) -> te.Tensor:
    """Return the product [..., M, N] of left [..., M, K] and packed [..., N/lanes, K, lanes]; batches are broadcast."""
    left_batch, right_batch = (tuple(map(int, shape)) for shape in (left.shape[:-2], packed.shape[:-3]))
    batch = np.broadcast_shapes(left_batch, right_batch)
    rows, depth = int(left.shape[-2]), int(left.shape[-1])
    blocks, _, lanes = (int(extent) for extent in packed.shape[-3:])
    tiled_rows = padded_extent(rows, blocks, traits)
    dtype = accumulator_dtype(out_dtype)
    k = te.reduce_axis((0, depth), name="k")

    def element(*index: Any) -> Any:
        *outer, block, row, lane = index
        # Padded rows repeat the last one; their results are never stored.
        row = row if tiled_rows == rows else tirx.min(row, rows - 1)
        value = left[(*broadcast_index(outer, left_batch), row, k)]
        factor = packed[(*broadcast_index(outer, right_batch), block, k, lane)]
        return te.sum(value.astype(dtype) * factor.astype(dtype), axis=k)

    product = te.compute((*batch, blocks, tiled_rows, lanes), element, name="matmul", attrs={ANCHOR: FAMILY})

    def store(*index: Any) -> Any:
        *outer, row, column = index
        return product[(*outer, column // lanes, row, column % lanes)].astype(out_dtype)

    return te.compute((*batch, rows, columns), store, name="store")


def _roles(extents: Sequence[int]) -> LoopRoles:
    """Return the loop roles for anchor iterators batch ..., column block, m, lane | k."""
    *batch, blocks, rows, lanes, depth = range(len(extents))
    return LoopRoles(tuple(batch), blocks, height=None, rows=rows, lanes=lanes, reduction=(depth,))


def _tiling(extents: tuple[int, ...], traits: Traits) -> Tiling:
    tile = dividing_tile(extents[-3], extents[-4], traits)
    depth = extents[-1]
    chunk: int | str = ALL_AT_ONCE
    if depth > DEPTH_IN_ONE_PASS and extents[-3] // tile.rows >= SMALLEST_REUSE:
        fitting = [divisor for divisor in divisors(depth) if SMALLEST_CHUNK <= divisor <= DEPTH_OF_CHUNK]
        chunk = max(fitting, default=ALL_AT_ONCE)
    return Tiling(str(tile), chunk, group=0, order=BLOCKS_OUTSIDE, unroll=4 if depth % 4 == 0 else 1)


MATMUL = contraction_template("matmul", FAMILY, _roles, _tiling)
