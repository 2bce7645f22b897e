"""Errors of the project.

They are defined in the lowest package, so that every package can raise them and one ``except`` catches them all:
``tvm_split.TvmSplitError``. Every message names the stage, machine or layer it is about and says what to do.
"""

import errno
import os

RAISE_FILES = "Raise the limit of open files (ulimit -n) of the process that reports this"


def out_of_files(error: object) -> str:
    """Return an error's text with the remedy, if its reason is that no file descriptor is free; else an empty text."""
    text = str(error)
    if os.strerror(errno.EMFILE) not in text:  # which every library quotes
        return ""
    return text if RAISE_FILES in text else f"{text}. {RAISE_FILES}"


class TvmSplitError(Exception):
    """The base of every error that this project raises on purpose."""


class InputError(TvmSplitError, ValueError):
    """A user's input is invalid: model inputs (number, name, shape, dtype), options, files or environment variables."""


class WorkerError(TvmSplitError):
    """A worker refused a request or could not execute it."""


class AccessError(WorkerError):
    """A worker refused a caller: it does not know the caller, or the caller may not do this, or no longer."""


class WorkerUnavailableError(WorkerError):
    """A worker cannot be reached, or ended or disconnected while it was needed."""


class StageError(WorkerError):
    """A stage failed while it computed a micro-batch."""


class DeadlineError(TvmSplitError, TimeoutError):
    """Something did not happen within the time the caller allowed for it."""


class BlobError(TvmSplitError):
    """A blob is missing, damaged, too large to store, or its folder cannot be used."""


class ProtocolError(TvmSplitError):
    """A peer sent a message that the protocol does not allow."""
