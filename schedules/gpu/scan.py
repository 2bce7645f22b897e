"""Lower cumulative sums and products to TIR: one block of threads per row, with a barrier after every step.

In TVM's kernel for last axes, lanes of a warp read what other lanes write at the same time. This is undefined since
sm_70.
"""

# mypy: disable-error-code="untyped-decorator"
from math import prod
from typing import Any

from tvm import relax, tirx
from tvm.relax import BlockBuilder
from tvm.script import tirx as T

from schedules.relax_tools import accumulator_dtype, default_legalization, static_shape, unravel

SCANS = ("relax.cumsum", "relax.cumprod")
MOST_THREADS = 256


def legalize_scan(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower ``relax.cumsum`` or ``relax.cumprod`` along an axis or over all elements; TVM lowers symbolic shapes."""
    shape = static_shape(call.args[0])
    if shape is None or prod(shape) == 0:
        return default_legalization(builder, call)
    axis = call.attrs.axis
    number = 0 if axis is None else int(axis) % len(shape)
    length = prod(shape) if axis is None else shape[number]
    name = call.op.name.rsplit(".", 1)[-1]
    dtypes = str(call.args[0].ty.dtype), str(call.ty.dtype)
    after = 1 if axis is None else prod(shape[number + 1 :])
    function = _kernel(shape, length, after, axis is None, *dtypes, name == "cumprod", bool(call.attrs.exclusive))
    return relax.call_tir(builder.add_func(function, name), [call.args[0]], out_ty=call.ty)


def _kernel(
    shape: tuple[int, ...],
    length: int,
    after: int,
    flat: bool,
    in_dtype: str,
    out_dtype: str,
    multiplies: bool,
    exclusive: bool,
) -> tirx.PrimFunc:
    """Return the kernel for rows of ``length`` elements, ``after`` elements apart; a ``flat`` result has one axis.

    Each thread reduces its part of a row to a total. The totals are scanned in shared memory by doubling (Hillis and
    Steele 1986), from one half of the memory to the other. Then each thread goes through its part again, starting from
    the total of all parts before it.
    """
    rows = prod(shape) // length
    dtype = accumulator_dtype(out_dtype)
    threads = min(MOST_THREADS, 1 << (length - 1).bit_length())
    stretch = -(-length // threads)
    rounds = threads.bit_length() - 1
    result_shape = (prod(shape),) if flat else shape
    nothing = tirx.const(int(multiplies), dtype)

    def joined(left: Any, right: Any) -> Any:
        return left * right if multiplies else left + right

    def at(extents: tuple[int, ...], row: Any, step: Any) -> tuple[Any, ...]:
        return tuple(unravel((row // after * length + step) * after + row % after, extents))

    @T.prim_func(private=True, s_tir=True)
    def scan(source_handle: T.handle, result_handle: T.handle) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "tvm_split.schedule": "scan"})
        source = T.match_buffer(source_handle, shape, in_dtype)
        result = T.match_buffer(result_handle, result_shape, out_dtype)
        for row in T.thread_binding(rows, thread="blockIdx.x"):
            with T.sblock("scan"):
                totals = T.sblock_alloc_buffer((2, threads), dtype, scope="shared")
                running = T.sblock_alloc_buffer((1,), dtype, scope="local")
                for thread in T.thread_binding(threads, thread="threadIdx.x"):
                    running[0] = nothing
                    for i in T.serial(stretch):
                        if thread * stretch + i < length:
                            running[0] = joined(running[0], T.Cast(dtype, source[at(shape, row, thread * stretch + i)]))
                    totals[0, thread] = running[0]
                    for turn in T.unroll(rounds):
                        T.tvm_storage_sync("shared")
                        if thread >= T.shift_left(1, turn):
                            totals[(turn + 1) % 2, thread] = joined(
                                totals[turn % 2, thread - T.shift_left(1, turn)], totals[turn % 2, thread]
                            )
                        else:
                            totals[(turn + 1) % 2, thread] = totals[turn % 2, thread]
                    T.tvm_storage_sync("shared")
                    running[0] = nothing
                    if thread > 0:
                        running[0] = totals[rounds % 2, thread - 1]
                    for i in T.serial(stretch):
                        if thread * stretch + i < length:
                            if exclusive:
                                result[at(result_shape, row, thread * stretch + i)] = T.Cast(out_dtype, running[0])
                            running[0] = joined(running[0], T.Cast(dtype, source[at(shape, row, thread * stretch + i)]))
                            if not exclusive:
                                result[at(result_shape, row, thread * stretch + i)] = T.Cast(out_dtype, running[0])

    return scan
