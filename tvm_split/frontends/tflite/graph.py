"""Read a TFLite file as a graph with static shapes, in which values that depend on no input are constants.

TensorFlow's graphs contain arithmetic on shapes, and files of half precision cast their weights in each run. LiteRT,
which also computes the reference values, computes both once, and the results become weights.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError, last_line
from tvm_split.frontends.convert import Kind
from tvm_split.frontends.dimensions import Specs
from tvm_split.frontends.names import UniqueNames

IDENTIFIER = b"TFL3"
"""The identifier at byte 4 of every TFLite file."""

_OF_SHAPES = frozenset({"SHAPE", "RANK"})
"""Operators whose results depend on shapes only."""

_NEVER_FOLDED = frozenset(
    (
        *("CALL", "CALL_ONCE", "IF", "WHILE", "STABLEHLO_WHILE", "VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"),
        *("HASHTABLE", "HASHTABLE_FIND", "HASHTABLE_IMPORT", "HASHTABLE_SIZE", "CUSTOM", "DELEGATE"),
        *("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL"),
    )
)

OPERATORS = {number: name for name, number in vars(schema.BuiltinOperator).items() if not name.startswith("_")}

_NUMBERS = re.compile(r"BOOL|U?INT(8|16|32|64)|FLOAT(16|32|64)")
DTYPES: dict[int, str] = {
    number: name.lower() for name, number in vars(schema.TensorType).items() if _NUMBERS.fullmatch(name)
}
"""numpy's names of the types of tensors that can be imported."""


@dataclass(frozen=True)
class Operator:
    """An operator: its kind (``CONV_2D``), the numbers of inputs (-1: none) and outputs, and its first output's name.

    ``options`` are named as in ``schema_py_generated``.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class TfliteGraph:
    """A graph with static shapes; ``content`` is its file, in which tensors are named by their numbers.

    ``inputs``, ``outputs`` and ``weights`` are numbers of tensors, with their names in the original file.
    ``is_quantized`` is true if the file has quantised tensors.
    """

    content: bytes
    operators: Sequence[Operator]
    tensors: Mapping[int, Kind]
    inputs: Mapping[int, str]
    outputs: Sequence[tuple[int, str]]
    weights: Mapping[int, str]
    is_quantized: bool


class TfliteFile:
    """A parsed TFLite file, before its sizes are bound."""

    def __init__(self, content: bytes, shown: str) -> None:
        """Parse ``content``, named ``shown`` in messages. Raises ModelImportError if it is not a TFLite file."""
        self.shown = shown
        if content[4:8] != IDENTIFIER:
            raise ModelImportError(f"{shown} is not a TFLite file: it does not have {IDENTIFIER.decode()} at byte 4")
        try:
            self.model = schema.ModelT.InitFromPackedBuf(bytearray(content))
            self.content = content if _made_readable(self.model) == 0 else _packed(self.model)
            self.graph = self.model.subgraphs[0]
            self.codes = [max(code.builtinCode, code.deprecatedBuiltinCode) for code in self.model.operatorCodes or ()]
            self.inputs = dict(zip(self._numbers("inputs"), self._names("inputs"), strict=True))
            self.outputs = list(zip(self._numbers("outputs"), self._names("outputs"), strict=True))
            self.operators = [self._operator(operator) for operator in _listed(self.graph.operators)]
            self._require_outputs()
        except ModelImportError:
            raise
        except Exception as error:  # accessors of flatbuffers raise various errors for a damaged file
            raise ModelImportError(f"{shown} cannot be read as a TFLite file: {last_line(error)}") from error

    def _require_outputs(self) -> None:
        available = {number for operator in self.operators for number in operator.outputs}.union(
            self._known(), self.inputs
        )
        lacking = [name for number, name in self.outputs if number not in available]
        if lacking or not self.outputs:
            what = f"output {lacking[0]!r}, which no operator makes" if lacking else "no outputs"
            raise ModelImportError(f"{self.shown} has {what}")

    def specs(self) -> Specs:
        """The name, sizes (None: open) and dtype of each input, as the file declares them."""
        return [(name, self._declared(number), self.dtype(number)) for number, name in self.inputs.items()]

    def dtype(self, number: int) -> str:
        """The dtype of a tensor. Raises ModelImportError for strings, complex numbers and other unsupported types."""
        tensor = self.graph.tensors[number]
        if tensor.type not in DTYPES:
            kind = next((name for name, code in vars(schema.TensorType).items() if code == tensor.type), tensor.type)
            raise ModelImportError(
                f"tensor {_text(tensor.name)!r} of {self.shown} is of {kind}, which cannot be computed with here"
            )
        return DTYPES[tensor.type]

    def bound(self, shapes: Sequence[Sequence[int]]) -> TfliteGraph:
        """Return the graph for inputs of these shapes. Raises ModelImportError if LiteRT cannot run it."""
        interpreter = interpreter_of(self.content, list(self.inputs), shapes)
        self._run(interpreter, shapes)
        constants = self._known()
        sizes = {
            details["index"]: [int(size) for size in details["shape"]] for details in interpreter.get_tensor_details()
        }

        def value(number: int) -> Array | None:
            return np.asarray(interpreter.get_tensor(number)) if number in constants else None

        model = schema.ModelT.InitFromPackedBuf(bytearray(self.content))
        places = [place for place, operator in enumerate(self.operators) if not self._is_known(operator, constants)]
        operators = [self.operators[place] for place in places]
        written = [model.subgraphs[0].operators[place] for place in places]
        _merge_dilations(operators, written, sizes, value, [number for number, _ in self.outputs])
        model.subgraphs[0].operators = written
        used = {number for operator in operators for number in (*operator.inputs, *operator.outputs)}
        used |= {*self.inputs, *(number for number, _ in self.outputs)}
        tensors = {number: Kind(self.dtype(number), tuple(sizes[number])) for number in sorted(used - {-1})}
        computed = {
            number for operator in self.operators if self._is_known(operator, constants) for number in operator.outputs
        }
        content = _static(model, tensors, {number: interpreter.get_tensor(number) for number in computed & used})
        scales = (tensor.quantization.scale for tensor in self.graph.tensors if tensor.quantization is not None)
        is_quantized = any(len(_listed(scale)) for scale in scales)
        return TfliteGraph(content, operators, tensors, self.inputs, self.outputs, self.weights(), is_quantized)

    def weights(self) -> dict[int, str]:
        """The names of constant tensors, and of tensors computed from constants alone, by number."""
        return {number: _text(self.graph.tensors[number].name) for number in self._known()}

    def _run(self, interpreter: Any, shapes: Sequence[Sequence[int]]) -> None:
        """Run with zeros, which are valid indices of every table; if that fails (division by zero), with ones."""
        for filling in (0, 1):
            try:
                for number, shape in zip(self.inputs, shapes, strict=True):
                    interpreter.set_tensor(number, np.full(shape, filling, np.dtype(self.dtype(number))))
                interpreter.invoke()
                return
            except Exception as error:
                reason = error
        raise ModelImportError(f"LiteRT cannot run {self.shown}: {last_line(reason)}") from reason

    def _numbers(self, which: str) -> list[int]:
        return [int(number) for number in _listed(getattr(self.graph, which))]

    def _names(self, which: str) -> list[str]:
        """The names of the file's ``inputs`` or ``outputs``: from its signature, the tensors, or else ``input_0``."""
        called = {
            int(entry.tensorIndex): _text(entry.name)
            for signature in _listed(self.model.signatureDefs)[:1]
            if signature.subgraphIndex == 0
            for entry in _listed(getattr(signature, which))
        }
        unique, names = UniqueNames(), []
        for place, number in enumerate(self._numbers(which)):
            name = called.get(number) or _text(self.graph.tensors[number].name).partition(":")[0]
            names.append(unique.take(name or f"{which.removesuffix('s')}_{place}"))
        return names

    def _operator(self, entry: Any) -> Operator:
        outputs = tuple(int(number) for number in _listed(entry.outputs))
        kind = OPERATORS.get(self.codes[entry.opcodeIndex], f"operator {self.codes[entry.opcodeIndex]}")
        if kind == "CUSTOM":
            kind = f"custom operator {_text(self.model.operatorCodes[entry.opcodeIndex].customCode)}"
        name = _text(self.graph.tensors[outputs[0]].name) if outputs else ""
        inputs = tuple(int(number) for number in _listed(entry.inputs))
        return Operator(kind, inputs, outputs, name, vars(entry.builtinOptions) if entry.builtinOptions else {})

    def _declared(self, number: int) -> list[int | None]:
        tensor = self.graph.tensors[number]
        signature = _listed(tensor.shapeSignature)
        shape = signature if len(signature) else _listed(tensor.shape)
        return [int(size) if size >= 0 else None for size in shape]

    def _is_known(self, operator: Operator, constants: set[int]) -> bool:
        return bool(operator.outputs) and set(operator.outputs) <= constants

    def _known(self) -> set[int]:
        """The numbers of constant tensors, and of tensors computed from constants alone."""
        buffers = self.model.buffers
        constants = {
            number
            for number, tensor in enumerate(self.graph.tensors)
            if not tensor.isVariable and len(_listed(buffers[tensor.buffer].data))
        } - set(self.inputs)
        for operator in self.operators:
            is_known = set(operator.inputs) - {-1} <= constants and bool(operator.inputs)
            if (is_known or operator.kind in _OF_SHAPES) and operator.kind not in _NEVER_FOLDED:
                constants |= set(operator.outputs)
        return constants


def _static(model: Any, tensors: Mapping[int, Kind], computed: Mapping[int, Array]) -> bytes:
    """Return the file with static shapes, ``computed`` values as constants, and tensors named by their numbers."""
    for number, tensor in enumerate(model.subgraphs[0].tensors):
        tensor.name = str(number)
        tensor.shapeSignature = None
        if number in tensors:
            tensor.shape = np.asarray(tensors[number].shape, "int32")
        if number in computed:
            data = np.ascontiguousarray(computed[number]).reshape(-1).view("uint8")
            tensor.buffer = len(model.buffers)
            tensor.sparsity = None
            model.buffers.append(schema.BufferT(data=data))
    return _packed(model)


def _packed(model: Any) -> bytes:
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def _made_readable(model: Any) -> int:
    """Escape names of tensors that are not UTF-8, which LiteRT omits; return the number of these names."""
    named = [tensor for graph in model.subgraphs for tensor in _listed(graph.tensors)]
    named += [
        entry
        for signature in _listed(model.signatureDefs)
        for entry in (*_listed(signature.inputs), *_listed(signature.outputs))
    ]
    unreadable = [entry for entry in named if _text(entry.name).encode() != (entry.name or b"")]
    for entry in unreadable:
        entry.name = _text(entry.name)
    return len(unreadable)


def _listed(vector: Any) -> Any:
    return () if vector is None or isinstance(vector, int) else vector


def _text(name: Any) -> str:
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name or ""


_CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D")


def _merge_dilations(
    operators: list[Operator],
    written: list[Any],
    shapes: Mapping[int, Sequence[int]],
    constant: Callable[[int], Array | None],
    outputs: Sequence[int],
) -> None:
    """Merge each convolution between SPACE_TO_BATCH_ND and BATCH_TO_SPACE_ND with both to a dilated one, if equivalent.

    Changes ``operators`` and ``written``, the file's operators, in place. ``constant`` returns the value of a tensor
    that depends on no input, else None. ``outputs`` are the graph's.
    """
    readers = Counter(number for operator in operators for number in operator.inputs) + Counter(outputs)
    for place in range(len(operators) - 2, 0, -1):
        before, convolution, after = operators[place - 1 : place + 2]
        kinds = (before.kind, after.kind)
        if convolution.kind not in _CONVOLUTIONS or kinds != ("SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND"):
            continue
        inner = (before.outputs[0], convolution.outputs[0])
        is_alone = (convolution.inputs[0], after.inputs[0]) == inner and all(readers[number] == 1 for number in inner)
        values = [constant(number) for number in (*before.inputs[1:], *after.inputs[1:])]
        dilated = _dilated(convolution, shapes[convolution.inputs[1]], values) if is_alone else None
        if dilated is None:
            continue
        merged = replace(convolution, inputs=(before.inputs[0], *convolution.inputs[1:]), outputs=after.outputs)
        entry = written[place]
        entry.inputs, entry.outputs = np.array(merged.inputs, "int32"), np.array(merged.outputs, "int32")
        vars(entry.builtinOptions).update(dilated)
        operators[place - 1 : place + 2], written[place - 1 : place + 2] = [merged], [entry]


def _dilated(convolution: Operator, kernel: Sequence[int], values: Sequence[Array | None]) -> Mapping[str, int] | None:
    """Return the options of the equivalent dilated convolution; None if there is none.

    ``values`` are the constants around the convolution (None: not constant): block, padding, block, crops.
    """
    ones = ("strideH", "strideW", "dilationHFactor", "dilationWFactor")
    is_plain = all(convolution.options[name] == 1 for name in ones)
    if not is_plain or convolution.options["padding"] != schema.Padding.VALID or any(value is None for value in values):
        return None
    steps, widths, same_steps, cuts = [value.tolist() for value in values if value is not None]
    if len(steps) != 2 or steps != same_steps:
        return None
    borders = [(low - first, high - last) for (low, high), (first, last) in zip(widths, cuts, strict=True)]
    reach = [(size - 1) * step for size, step in zip(kernel[1:3], steps, strict=True)]
    paddings = {
        schema.Padding.SAME: [(extent // 2, extent - extent // 2) for extent in reach],
        schema.Padding.VALID: [(0, 0), (0, 0)],
    }
    padding = next((kind for kind, widths in paddings.items() if widths == borders), None)
    if padding is None:
        return None
    return {"dilationHFactor": steps[0], "dilationWFactor": steps[1], "padding": padding}


@dataclass(frozen=True)
class TfliteReference:
    """Run the original file ``source`` with inputs of these ``shapes``, by the numbers of their tensors.

    ``variables`` maps the numbers of tensors to the variables that hold them, in execution order.
    """

    source: bytes
    shapes: Mapping[int, Sequence[int]]
    results: Sequence[int]
    variables: Mapping[int, str]

    def outputs(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The model's outputs in the file's order."""
        interpreter = self._run(inputs)
        return tuple(np.array(interpreter.get_tensor(number)) for number in self.results)

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        """Yield the variable name and the value of every computed tensor, in execution order."""
        interpreter = self._run(inputs)
        for number, variable in self.variables.items():
            if number not in self.shapes:
                yield variable, np.array(interpreter.get_tensor(number))

    def _run(self, inputs: Sequence[Array]) -> Interpreter:
        interpreter = interpreter_of(self.source, list(self.shapes), list(self.shapes.values()))
        for number, array in zip(self.shapes, inputs, strict=True):
            interpreter.set_tensor(number, np.ascontiguousarray(array))
        interpreter.invoke()
        return interpreter


def interpreter_of(content: bytes, inputs: Sequence[int], shapes: Sequence[Sequence[int]]) -> Any:
    """Return LiteRT's interpreter, which keeps all tensors' values. Raises ModelImportError if it rejects the file."""
    try:
        interpreter = Interpreter(
            model_content=content,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            experimental_preserve_all_tensors=True,
        )
        for number, shape in zip(inputs, shapes, strict=True):
            interpreter.resize_tensor_input(number, list(shape))
        interpreter.allocate_tensors()
    except Exception as error:
        raise ModelImportError(
            f"LiteRT does not take this file with inputs of {list(shapes)}: {last_line(error)}"
        ) from error
    return interpreter
