"""Kernels to be timed on the machines of one target: those of a whole model or of some stages."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

import tvm
import tvm_ffi
from pydantic import TypeAdapter
from tvm import relax, tirx

import schedules
from relay_passes.costs import size_bytes, tensors_in
from relay_passes.ir import bindings_of, is_tensor_constant, main_function, operator_name, shape_of, used_variables
from relay_passes.lift_weights import LARGEST_EMBEDDED_BYTES
from rpc_runtime.program.measurements import TimedKernel
from rpc_runtime.program.specs import BlobSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from schedules.tuning.database import TuningDatabase
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.build_cache import keep, key_of, recall
from tvm_split.compiler.stage import Kernel, StageCompiler, kernels_of
from tvm_split.model import Model
from tvm_split.placement.estimate import CORE


@dataclass(frozen=True)
class Weight:
    """Prepacked weights, identified by their address in this process; kernels that share weights share ``address``."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel in a scheduled stage.

    ``timed`` has its operands and results. ``weights`` lacks small weights, which are embedded in the code.
    ``consumers`` are the positions of the calls that read a result, also through views.
    """

    kernel: Kernel
    timed: TimedKernel
    weights: tuple[Weight, ...]
    consumers: tuple[int, ...]

    @property
    def digest(self) -> str:
        """The kernel's content name, which is equal for equal kernels of any model."""
        return self.kernel.function

    @property
    def activation_bytes(self) -> int:
        """Bytes of operands and results, without weights."""
        timed = self.timed
        return sum(argument.size_bytes for i, argument in enumerate(timed.arguments) if i not in timed.weights)


def kernel_calls(module: tvm.IRModule, kernels: tuple[Kernel, ...]) -> tuple[KernelCall, ...]:
    """Return the kernel calls of a stage, in order, from its module after the last phase.

    ``kernels`` is the result of `kernels_of`: one for each call.
    """
    made_by: dict[str, frozenset[int]] = {}
    consumers: list[set[int]] = [set() for _ in kernels]
    calls: list[tuple[Kernel, relax.Call]] = []
    for binding in bindings_of(main_function(module)):
        sources: frozenset[int] = frozenset().union(
            *(made_by.get(used.name, frozenset()) for used in used_variables(binding.value))
        )
        if operator_name(binding.value) == "relax.call_tir":
            position = len(calls)
            for source in sources:
                consumers[source].add(position)
            calls.append((kernels[position], binding.value))
            sources = frozenset({position})
        made_by[binding.var.name] = sources
    return tuple(
        _kernel_call(kernel, call, tuple(sorted(after))) for (kernel, call), after in zip(calls, consumers, strict=True)
    )


def is_safe_to_time(function: tirx.PrimFunc) -> bool:
    """Whether a kernel certainly ends without failure on made-up values, in which integers are zero.

    A kernel is unsafe if it divides by an integer that it reads, or has a while loop.
    """
    dangers: list[object] = []

    def visit_division(node: Any) -> None:
        if not str(node.ty).startswith("float") and _occurs(tvm.ir.TensorLoad, node.b):
            dangers.append(node)

    divisions = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
    tvm_ffi.structural_walk(function.body, [(tirx.While, dangers.append), (divisions, visit_division)])
    return not dangers


def _occurs(kind: type, expression: object) -> bool:
    matches: list[object] = []
    tvm_ffi.structural_walk(expression, [(kind, matches.append)])
    return bool(matches)


def _kernel_call(kernel: Kernel, call: relax.Call, consumers: tuple[int, ...]) -> KernelCall:
    operands = list(call.args[1].fields)
    results = tensors_in(call.ty)
    constants = [i for i, operand in enumerate(operands) if is_tensor_constant(operand)]
    weights = {
        Weight(operands[i].value.data_ptr(), size_bytes(operands[i].ty))
        for i in constants
        if size_bytes(operands[i].ty) > LARGEST_EMBEDDED_BYTES
    }
    types = [*(tensor for operand in operands for tensor in tensors_in(operand.ty)), *results]
    arguments = tuple(TensorSpec("", shape_of(kind), str(kind.dtype)) for kind in types)
    return KernelCall(
        kernel=kernel,
        timed=TimedKernel(kernel.function, arguments, frozenset(constants), len(results)),
        weights=tuple(sorted(weights, key=lambda weight: weight.address)),
        consumers=consumers,
    )


def shared_weight_bytes(calls: tuple[KernelCall, ...] | list[KernelCall]) -> int:
    """Return the bytes of all weights of some calls; shared weights count once."""
    return sum(weight.size_bytes for weight in {weight for call in calls for weight in call.weights})


@dataclass(frozen=True, eq=False)
class TargetCode:
    """The kernel calls of some stages, in order; ``functions`` returns the distinct kernels by digest.

    ``weight_bytes`` is the size of all their weights, shared ones once. ``untimeable`` are the digests of the
    kernels that must not run on made-up values.
    """

    target: Mapping[str, Any]
    calls: tuple[KernelCall, ...]
    functions: Callable[[], Mapping[str, tirx.PrimFunc]]
    weight_bytes: int
    untimeable: frozenset[str]

    @cached_property
    def distinct(self) -> dict[str, KernelCall]:
        """The first call of every distinct kernel, by digest, in the order of the model."""
        first_calls: dict[str, KernelCall] = {}
        for call in self.calls:
            first_calls.setdefault(call.digest, call)
        return first_calls

    @property
    def device(self) -> str:
        return "cuda" if self.target["kind"] == "cuda" else "cpu"

    @cached_property
    def by_seconds(self) -> tuple[str, ...]:
        """The digests of the kernels that can be timed; first those that probably take most of the network's time.

        Before all others comes the first kernel of each schedule rule: the others of its rule are estimated by it.
        """
        seconds: defaultdict[str, float] = defaultdict(float)
        for call in self.calls:
            if call.digest not in self.untimeable:
                seconds[call.digest] += CORE.seconds(call.kernel.operations, call.kernel.moved_bytes)
        longest = sorted(seconds, key=lambda digest: -seconds[digest])
        first = {self.distinct[digest].kernel.rule: digest for digest in reversed(longest)}
        return tuple(dict.fromkeys((*reversed(first.values()), *longest)))

    def compiled(self, digests: Collection[str], deadline: float) -> frozenset[str]:
        """Compile kernels until ``deadline`` (seconds of `time.monotonic`), and return which ones are done."""
        wanted = [digest for digest in self.by_seconds if digest in digests]
        return StageCompiler(self.target).compile_until(wanted, self.functions, deadline)

    def build(self, digests: Collection[str], blobs: BlobFolder) -> BlobSpec:
        """Return a library that has the kernels with these digests; build it unless the cache has one.

        For a single kernel, it may also be the cached library of all kernels.
        """
        everything = self.distinct.keys() - self.untimeable
        for kernels in (digests, everything) if len(digests) == 1 else (digests,):
            if (kept := recall(self._library_key(kernels), blobs)) is not None:
                return BlobSpec(**kept)
        with ScratchFolder("build") as folder:
            path, what = folder.path / "kernels.so", f"the library of {len(digests)} kernels to time"
            StageCompiler(self.target).build_kernels(digests, self.functions, path, what)
            library = blobs.add_file(path)
        keep(self._library_key(digests), asdict(library), {library: blobs.path(library.sha256)})
        return library

    def _library_key(self, digests: Collection[str]) -> str:
        return key_of([self.target], library=sorted(digests), target=dict(self.target))


def target_code(model: Model, target: Mapping[str, Any], database: TuningDatabase | None) -> TargetCode:
    """Return the kernel calls of a whole model for a target, scheduled as `tvm_split.compile` would for a single stage.

    If the calls are cached, the model is scheduled when the first function is needed.
    """
    function = main_function(model.module)
    scheduled = cache(lambda: scheduled_calls(function, target, model.layers, database))
    ((calls, untimeable),) = kept_calls([target], lambda: [scheduled()], database, model=model.digest)
    return TargetCode(target, calls, lambda: scheduled()[1], shared_weight_bytes(calls), untimeable)


Scheduled = tuple[tuple[KernelCall, ...], Mapping[str, tirx.PrimFunc]]
"""The kernel calls of a function, and its distinct kernels by digest."""


def kept_calls(
    targets: Sequence[Mapping[str, Any]],
    scheduled: Callable[[], Iterable[Scheduled]],
    database: TuningDatabase | None,
    **source: Any,
) -> list[tuple[tuple[KernelCall, ...], frozenset[str]]]:
    """Return the calls of functions, each with the digests of the kernels that must not run on made-up values.

    They are cached by ``source`` (JSON values that decide what the functions are), targets and tuning; if they are not
    cached, they are those of ``scheduled()``.
    """
    tuned = None if database is None else database.digest
    key = key_of(targets, calls=source, built_for=[dict(target) for target in targets], tuned=tuned)
    kept = recall(key)
    if kept is None:
        kept = [(_CALLS.dump_python(calls, mode="json"), sorted(untimeable_in(made))) for calls, made in scheduled()]
        keep(key, kept)
    return [(_CALLS.validate_python(calls), frozenset(untimeable)) for calls, untimeable in kept]


_CALLS = TypeAdapter(tuple[KernelCall, ...])


def untimeable_in(functions: Mapping[str, tirx.PrimFunc]) -> frozenset[str]:
    """Return the digests of the kernels that must not run on made-up values."""
    return frozenset(digest for digest, function in functions.items() if not is_safe_to_time(function))


def scheduled_calls(
    function: relax.Function,
    target: Mapping[str, Any],
    layers: Mapping[str, str],
    database: schedules.TunedKernels | None,
) -> Scheduled:
    """Schedule a stage's function for a target."""
    modules = StageCompiler(target, database).lower(function)
    calls = kernel_calls(modules["name"], kernels_of(modules, layers))
    return calls, {call.digest: modules["name"][call.kernel.function] for call in calls}
