"""Read StableHLO modules from text or bytecode, bind their open sizes, and read their contents and attributes."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError, last_line

_PORTABLE = b"StableHLO_v"
"""A marker near the beginning of portable bytecode, which other versions can read."""

OVER_AXES = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "and": "min", "or": "max"}
_DTYPES = {
    "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "ui8": "uint8", "ui16": "uint16", "ui32": "uint32", "ui64": "uint64",
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
}  # fmt: skip


@cache
def _context() -> ir.Context:
    """The MLIR context with the dialects that JAX and TensorFlow export; parsing needs only jaxlib."""
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    sdy.register_dialect(context)
    return context


@contextmanager
def in_context() -> Iterator[None]:
    """Enter the MLIR context, in which modules are built and changed."""
    with _context(), ir.Location.unknown(_context()):
        yield


def parsed(text: str | bytes, shown: str) -> ir.Module:
    """Parse text or bytecode, including portable artefacts of other versions; ``shown`` names it in errors."""
    with in_context():
        try:
            if isinstance(text, bytes) and _PORTABLE in text[:32]:
                return stablehlo.deserialize_portable_artifact(_context(), text)
            return ir.Module.parse(text)
        except Exception as error:
            raise ModelImportError(f"{shown} cannot be read as a StableHLO module: {last_line(error)}") from error


def bytecode(module: ir.Module) -> bytes:
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def functions(module: ir.Module) -> dict[str, Any]:
    by_name = {}
    for operation in module.body.operations:
        if operation.operation.name == "func.func":
            by_name[ir.StringAttr(operation.attributes["sym_name"]).value] = operation
    return by_name


def main_of(module: ir.Module) -> Any:
    """Return the entry function: ``main``, or the only public one. Raises ModelImportError if there is none."""
    by_name = functions(module)
    public = [
        function
        for function in by_name.values()
        if "sym_visibility" not in function.attributes
        or ir.StringAttr(function.attributes["sym_visibility"]).value == "public"
    ]
    main = by_name.get("main", public[0] if len(public) == 1 else None)
    if main is None:
        raise ModelImportError(
            f"the StableHLO module has the functions {', '.join(by_name) or '(none)'}: which one is the network is not "
            "known; name it main, or make all others private"
        )
    return main


def block_of(function: Any) -> Any:
    return function.regions[0].blocks[0]


def shape_and_dtype(kind: ir.Type) -> tuple[tuple[int | None, ...], str]:
    """Sizes (None: open) and dtype of a tensor type. Raises ModelImportError for other types."""
    try:
        tensor = ir.RankedTensorType(kind)
    except ValueError as error:
        raise ModelImportError(f"a value of type {kind} is not a tensor of known rank") from error
    element = str(tensor.element_type)
    if element not in _DTYPES:
        raise ModelImportError(f"a tensor of {element} cannot be computed with here")
    sizes = (None if ir.ShapedType.is_dynamic_size(size) else size for size in tensor.shape)
    return tuple(sizes), _DTYPES[element]


def with_sizes(module: ir.Module, shapes: Sequence[Sequence[int]]) -> ir.Module:
    """Return a copy of ``module`` whose main function takes these shapes; all other sizes are inferred."""
    with in_context():
        copy = ir.Module.parse(bytecode(module))
        main = main_of(copy)
        block = block_of(main)
        first = ir.InsertionPoint.at_block_begin(block)
        kinds = [
            ir.RankedTensorType.get(list(shape), ir.RankedTensorType(argument.type).element_type)
            for argument, shape in zip(block.arguments, shapes, strict=True)
        ]
        for argument, kind in zip(block.arguments, kinds, strict=True):
            if argument.type != kind:
                _set_kind(argument, kind, first)
        results = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kinds, results))
        main.attributes["sym_name"] = ir.StringAttr.get("main")
        try:
            return ir.Module.parse(_jax.mlir.refine_polymorphic_shapes(bytecode(copy)))
        except Exception as error:
            raise ModelImportError(
                f"the module cannot have inputs of the shapes {[list(shape) for shape in shapes]}: {last_line(error)}"
            ) from error


def _set_kind(argument: ir.Value, kind: ir.Type, first: ir.InsertionPoint) -> None:
    """Give an argument static sizes; its uses get a wrapper of the open type, so that XLA refines them all.

    StableHLO's pass ``stablehlo-refine-arguments`` (``StablehloRefineArguments.cpp``) does the same.
    """
    before = argument.type
    argument.set_type(kind)
    sizes = np.array(ir.RankedTensorType(kind).shape, np.int64)
    shape = ir.Operation.create(
        "stablehlo.constant",
        [ir.RankedTensorType.get([len(sizes)], ir.IntegerType.get_signless(64))],
        attributes={"value": ir.DenseElementsAttr.get(sizes)},
        ip=first,
    )
    wrapped = ir.Operation.create(
        "stablehlo.custom_call",
        [before],
        [argument, shape.results[0]],
        {
            "call_target_name": ir.StringAttr.get("stablehlo.shape_refinement_operand_wrapper"),
            "indices_of_shape_operands": ir.DenseElementsAttr.get(np.array([1], np.int64)),
        },
        ip=first,
    )
    argument.replace_all_uses_except(wrapped.results[0], [wrapped])


def array_of(attribute: ir.Attribute) -> Array:
    """The elements of a ``dense`` attribute. Raises ModelImportError if the text omits them."""
    if isinstance(attribute, ir.DenseResourceElementsAttr):
        raise ModelImportError("a constant's values were left out of the text; write it with all its values")
    shape, dtype = shape_and_dtype(ir.ShapedType(attribute.type))
    sizes = [size for size in shape if size is not None]
    if dtype == "bfloat16":
        return np.resize(_bfloat16_of(str(attribute)), sizes)
    return np.array(ir.DenseElementsAttr(attribute)).reshape(sizes)


def _bfloat16_of(text: str) -> Array:
    """Parse bfloat16 elements from the text of a ``dense`` attribute, since MLIR's bindings cannot return them."""
    inner = text[len("dense<") : text.rindex("> : ")]
    if inner.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(inner.strip('"')[2:]), ml_dtypes.bfloat16)
    words = re.findall(r"[^\[\],\s]+", inner)
    bits = [
        int(word, 16) if word.startswith("0x") else int(np.asarray(float(word), ml_dtypes.bfloat16).view(np.uint16))
        for word in words
    ]
    return np.array(bits, np.uint16).view(ml_dtypes.bfloat16)


def result_kind(operation: ir.Operation, place: int = 0) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of one result of static shape."""
    shape, dtype = shape_and_dtype(operation.results[place].type)
    return tuple(size for size in shape if size is not None), np.dtype(dtype)


def integers(operation: ir.Operation, name: str, otherwise: Any = None) -> list[int]:
    """The integers of an array attribute; ``otherwise`` if it is absent."""
    if name not in operation.attributes:
        return list(otherwise or ())
    attribute = operation.attributes[name]
    if isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseBoolArrayAttr):
        return [int(number) for number in attribute]
    return [int(number) for number in array_of(attribute).ravel()]


def integer(operation: ir.Operation, name: str, otherwise: int = 0) -> int:
    return ir.IntegerAttr(operation.attributes[name]).value if name in operation.attributes else otherwise


def pairs(operation: ir.Operation, name: str, count: int) -> list[tuple[int, int]]:
    """Two numbers for each of ``count`` axes, such as paddings; zeros if the attribute is absent."""
    if name not in operation.attributes:
        return [(0, 0)] * count
    return [(int(low), int(high)) for low, high in array_of(operation.attributes[name]).reshape(-1, 2)]


def combined_by(operation: ir.Operation) -> str:
    """Return the operator by which a region combines two arguments (``add``); ``replace`` if it returns the second.

    Raises ModelImportError for other regions.
    """
    block = operation.regions[0].blocks[0]
    *body, end = [op_view.operation for op_view in block.operations]
    arguments = list(block.arguments)
    if len(body) == 1 and len(arguments) == 2 and set(body[0].operands) == set(arguments):
        kind = str(body[0].name).partition(".")[2]
        if kind in OVER_AXES and list(end.operands) == list(body[0].results):
            return kind
    if not body and len(arguments) == 2 and list(end.operands) == [arguments[1]]:
        return "replace"
    raise ModelImportError(
        "it combines elements in a way of its own; sums, products, minima, maxima, all and any can be imported"
    )


def comparison(operation: ir.Operation) -> str:
    """The direction of a comparison: ``LT`` of ``#stablehlo<comparison_direction LT>``."""
    return str(operation.attributes["comparison_direction"]).rstrip(">").rpartition(" ")[2]
