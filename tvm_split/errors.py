"""Errors of the front door; those of the running system are in ``rpc_runtime.errors`` and have the same base."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rpc_runtime.errors import TvmSplitError


class ModelImportError(TvmSplitError):
    """A model cannot be imported; the message names the operator and the layer."""


class OpenAxesError(ModelImportError):
    """Axes of a model's inputs have no size; the message has them all, ``options`` what a command line may give.

    Args:
        places: where each open size is first, such as ``ids[1]``, by its name.
        first: the names of sizes of first axes, which a batch binds.
    """

    def __init__(self, places: Mapping[str, str], first: Collection[str]) -> None:
        ends = {name: place[:-1].rpartition("[") for name, place in places.items()}
        listed = ", ".join(f"axis {axis} of input {given!r} ({name!r})" for name, (given, _, axis) in ends.items())
        others = {name: 128 for name in places if name not in first}
        batch = len(others) < len(places)
        arguments = ["batch=1"] * batch + [f"dimensions={others}"] * bool(others)
        self.problem = f"open axes have no size: {listed}"
        self.options = " ".join(["--batch 1"] * batch + [f"--dimension {name}=128" for name in others])
        super().__init__(f"{self.problem}; give sizes, for example {', '.join(arguments)}, or example_inputs")


class PlanError(TvmSplitError, ValueError):
    """A split or plan does not fit the model or the cluster."""


class ClusterError(TvmSplitError, ValueError):
    """A cluster is described wrongly, or a machine of it is not what the plan needs."""


class CompileError(TvmSplitError):
    """A stage cannot be compiled for its machine's target."""


class VerificationError(TvmSplitError):
    """The compiled stages and the source disagree; the message names the first layer whose values part."""


class ReferenceFailedError(VerificationError):
    """The source framework's own run of a model crashed, did not end, or needed too much memory."""


class ProfileError(TvmSplitError):
    """A compiled model cannot be timed here."""


class KitError(TvmSplitError):
    """A kit of what a worker needs cannot be made, or not written where it should be."""


class BundleError(TvmSplitError):
    """A bundle folder is incomplete, changed, or written by another version."""


class TuningError(TvmSplitError):
    """Tuning cannot start or go on, or a tuning database cannot be used."""


class TuningUseError(TuningError, ValueError):
    """Tuning was asked for something that cannot be meant; the message says what to give instead."""


class UntriedVersionWarning(UserWarning):
    """A framework is installed in a version that tvm-split was not tested with; the message says which ones it was."""


class MeasurementsWarning(UserWarning):
    """Measurements cannot be read or kept, so that they are made again; the message names the file and the remedy."""


class OneMachineWarning(UserWarning):
    """One machine alone is faster than the split, or than any split; the message has both figures."""


def last_line(error: Exception) -> str:
    """What TVM or a framework says in the end, after its backtraces; the kind of the error where it says nothing.

    Lines without letters underline what stands above them, and do not count.
    """
    said = [line for line in str(error).strip().splitlines() if any(map(str.isalpha, line))]
    return (said or [type(error).__name__])[-1]
