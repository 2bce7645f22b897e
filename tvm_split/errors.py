"""Errors of the public API; errors of the running system are in ``rpc_runtime.errors`` and have the same base."""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from rpc_runtime.errors import TvmSplitError

Value = TypeVar("Value")


class ModelImportError(TvmSplitError):
    """A model cannot be imported; the message names the operator and the layer."""


class OpenAxesError(ModelImportError):
    """Axes of a model's inputs have no size; the message lists all, ``options`` are example command-line options.

    Args:
        places: the first axis of each open size by the size's name, such as ``ids[1]``.
        first: the names of the sizes of first axes, which a batch size sets.
    """

    def __init__(self, places: Mapping[str, str], first: Collection[str]) -> None:
        ends = {name: place[:-1].rpartition("[") for name, place in places.items()}
        listed = ", ".join(
            f"axis {axis} of input {input_name!r} ({name!r})" for name, (input_name, _, axis) in ends.items()
        )
        free_dimensions = {name: 128 for name in places if name not in first}
        batch = len(free_dimensions) < len(places)
        arguments = ["batch=1"] * batch + [f"dimensions={free_dimensions}"] * bool(free_dimensions)
        self.problem = f"open axes have no size: {listed}"
        self.options = " ".join(["--batch 1"] * batch + [f"--dimension {name}=128" for name in free_dimensions])
        super().__init__(f"{self.problem}; give sizes, for example {', '.join(arguments)}, or example_inputs")


class NoExamplesError(ModelImportError):
    """The shapes of a network's inputs are unknown; ``problem`` says of which network."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"{problem}: give example_inputs, a tuple of arrays with the shapes and dtypes the network will be run with"
        )


class PlanError(TvmSplitError, ValueError):
    """A split or plan does not fit the model or the cluster."""


class NoPlanError(PlanError):
    """No plan fits the model, the machines and the demands; the message names the demand that fails and the gap."""


class ClusterError(TvmSplitError, ValueError):
    """A cluster description is wrong, or one of its machines does not match the plan."""


class TraceError(TvmSplitError):
    """A trace cannot be read, or cannot be written in the requested format."""


class CompileError(TvmSplitError):
    """A stage cannot be compiled for its machine's target."""


class VerificationError(TvmSplitError):
    """The compiled stages and the source disagree; the message names the first layer whose values differ."""


class ReferenceFailedError(VerificationError):
    """The source framework's own run of a model crashed, did not end, or needed too much memory."""


class OutputError(TvmSplitError):
    """A result cannot be written; the message names its path, and what to do on a full disk."""


class ProfileError(TvmSplitError):
    """A model, a machine or a link cannot be timed; the message names it and the reason."""


class KitError(TvmSplitError):
    """A worker kit cannot be built, or cannot be written to its path."""


class BundleError(TvmSplitError):
    """A bundle folder is incomplete, changed, or written by another version."""


class TuningError(TvmSplitError):
    """Tuning cannot start or continue, or a tuning database cannot be used."""


class TuningUseError(TuningError, ValueError):
    """The arguments of tuning are invalid; the message says what to give instead."""


class UntriedVersionWarning(UserWarning):
    """A framework has a version with which tvm-split was not tested; the message names the tested versions."""


class CacheWarning(UserWarning):
    """Measurements or compiled stages cannot be read or kept, so they are made again; names folder and remedy."""


class CompileWarning(UserWarning):
    """A plan's prediction is not for the compiled model, or a comparison with the source proves little."""


class RecoveryWarning(UserWarning):
    """A machine of a deployment failed, and its stages were moved; the message has the cause and the pause."""


class OneMachineWarning(UserWarning):
    """One machine alone is faster than the split, or than any split; the message gives both figures."""


def required(kind: type[Value], value: Any, error: type[TvmSplitError], hint: str) -> Value:
    """Return ``value`` if it is of class ``kind``; else raise ``error``, whose message ends with ``hint``."""
    if not isinstance(value, kind):
        raise error(f"got a value of class {type(value).__name__} instead of {kind.__name__}: {hint}")
    return value


def class_and_first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def last_line(error: Exception) -> str:
    """Return the last line of an error message, after backtraces; the error's class name if the message is empty.

    Lines without letters only underline the line above them, and are skipped.
    """
    lines = [line for line in str(error).strip().splitlines() if any(map(str.isalpha, line))]
    # TVM prints all fields of an operator where its name says the same.
    return re.sub(r'ir\.Op\(.*?name="([\w.]+)".*?support_level=\d+\)', r"\1", (lines or [type(error).__name__])[-1])
