"""Errors of the project.

They are defined in the lowest package, so that every package can raise them and one ``except`` catches them all:
``tvm_split.TvmSplitError``. Every message names the stage, machine or layer it is about and says what to do.
"""

from __future__ import annotations


class TvmSplitError(Exception):
    """The base of every error that this project raises on purpose."""


class InputError(TvmSplitError, ValueError):
    """A model input has the wrong number, name, shape or dtype."""


class WorkerError(TvmSplitError):
    """A worker refused a request or could not execute it."""


class WorkerUnavailableError(WorkerError):
    """A worker cannot be reached, or ended or disconnected while it was needed."""


class StageError(WorkerError):
    """A stage failed while it computed a micro-batch."""


class DeadlineError(TvmSplitError, TimeoutError):
    """Something did not happen within the time the caller allowed for it."""


class BlobError(TvmSplitError):
    """A blob's content is not what its SHA-256 digest says."""


class ProtocolError(TvmSplitError):
    """A peer sent what the protocol does not allow."""
