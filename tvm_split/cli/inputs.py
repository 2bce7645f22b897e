"""Inputs for commands that run a model: from an .npz file, or random."""

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from rpc_runtime.errors import InputError
from rpc_runtime.files import require_file
from rpc_runtime.program.runner import Outputs
from rpc_runtime.program.specs import TensorSpec
from tvm_split.compiler.rows import Rows
from tvm_split.deployment.batch import Batch
from tvm_split.outputs import written

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class MicroBatches:
    """``count`` micro-batches, made one by one by ``make`` from their index; ``source`` says where they come from.

    ``rows`` has each output's axis of rows, if the micro-batches are parts of one batch.
    """

    count: int
    make: Callable[[int], Arrays]
    source: str
    rows: tuple[int, ...] = ()

    def stream(self, repeat: int) -> Iterator[Arrays]:
        for _ in range(repeat):
            for index in range(self.count):
                yield self.make(index)


def random_inputs(expected: Sequence[TensorSpec], count: int) -> MicroBatches:
    """Return seeded micro-batches: standard normal floats, 0 or 1 for other dtypes, which suits indices and masks."""

    def make(index: int) -> Arrays:
        generator = np.random.default_rng(index)
        return tuple(_random(spec, generator) for spec in expected)

    return MicroBatches(count, make, "random")


def inputs_from_file(expected: Sequence[TensorSpec], path: Path, rows: Rows) -> MicroBatches:
    """Return the micro-batches of an .npz file; its arrays have the inputs' names, or are ``arr_0``, … in order.

    An array has its input's shape (one micro-batch), another number of ``rows``, or one more leading axis over the
    micro-batches.

    Raises:
        InputError: an array does not fit its input; the message has both shapes.
    """
    arrays = _by_input(expected, _read(path), path)
    if all(array.shape[1:] == spec.shape[1:] for spec, array in zip(expected, arrays, strict=True)):
        try:
            batch = Batch(expected, rows, arrays)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        if not batch.rows:
            raise InputError(f"{path} holds no rows: its leading axis has length 0")
        return MicroBatches(batch.micro_batches, batch.part, str(path), rows.outputs)
    counts: dict[str, int | None] = {}
    for spec, array in zip(expected, arrays, strict=True):
        if array.shape == spec.shape:
            counts[spec.name] = None
        elif array.shape[1:] == spec.shape:
            counts[spec.name] = len(array)
        else:
            raise InputError(
                f"{path}: the model takes {spec}, the file has the shape {list(array.shape)}; give that shape, or one "
                "more leading axis for several micro-batches"
            )
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {'one' if count is None else count}" for name, count in counts.items())
        raise InputError(f"{path}: the inputs have different numbers of micro-batches: {listed}")
    (count,) = {*counts.values()}
    if not count:
        raise InputError(f"{path} holds no micro-batch: its leading axis has length 0")
    return MicroBatches(count, lambda index: tuple(array[index] for array in arrays), str(path))


def save_outputs(path: Path, results: Sequence[Outputs], rows: Sequence[int] = ()) -> dict[str, list[int]]:
    """Write outputs to an .npz file, each joined along its axis of ``rows``, or stacked along a new first axis.

    bfloat16 and the float8 types, which numpy's files do not support, are converted to float32 without loss. Returns
    the arrays' shapes by name.
    """
    arrays: dict[str, np.ndarray] = {}
    for name in results[0].names:
        parts = [outputs[name] for outputs in results]
        joined = np.concatenate(parts, rows[len(arrays)]) if rows else np.stack(parts)
        arrays[name] = joined.astype(np.float32) if joined.dtype.kind == "V" else joined
    # Like numpy.savez, which rejects an array named "file".
    with written(path) as beside, zipfile.ZipFile(beside, "w") as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return {name: list(array.shape) for name, array in arrays.items()}


def _random(spec: TensorSpec, generator: np.random.Generator) -> np.ndarray:
    kind = np.dtype(spec.dtype)
    if kind.kind in "fV":
        return generator.standard_normal(spec.shape).astype(kind)
    return generator.integers(0, 2, spec.shape).astype(kind)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        require_file(path)
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise InputError(f"{path} is a single array; save it with numpy.savez")
        with content:
            return {name: content[name] for name in content.files}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # numpy and zipfile raise errors of many classes for damaged files
        raise InputError(f"{path} is not an .npz file of plain arrays: {error}") from error


def _by_input(expected: Sequence[TensorSpec], named: Mapping[str, np.ndarray], path: Path) -> Arrays:
    from tvm_split.frontends.names import identifier

    names = [spec.name for spec in expected]
    numbered = [f"arr_{position}" for position in range(len(expected))]
    # The ONNX input in/put:0 is named in_put_0 here; the file may use either name.
    renamed = {identifier(name): array for name, array in named.items()}
    for arrays, keys in ((named, names), (named, numbered), (renamed, names)):
        if set(arrays) == set(keys) and len(arrays) == len(named):
            return tuple(_with_dtype(spec, arrays[key], path) for spec, key in zip(expected, keys, strict=True))
    raise InputError(
        f"{path} has the arrays {', '.join(sorted(named)) or 'none'}; the model takes {', '.join(map(str, expected))}. "
        f"Name them so, or {', '.join(numbered)}"
    )


def _with_dtype(spec: TensorSpec, array: np.ndarray, path: Path) -> np.ndarray:
    dtype = np.dtype(spec.dtype)
    if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize and dtype.kind == "V":
        return array.view(dtype)  # numpy's files keep the bytes of bfloat16, but not the dtype
    if array.dtype != dtype:
        raise InputError(
            f"{path}: the model takes {spec}, the file has {array.dtype}; convert it: array.astype({spec.dtype!r})"
        )
    return array
