"""Find the tuning database that `compile` and `tune` use if none is named."""

import os
from pathlib import Path

from rpc_runtime.files import cache_folder, reason_and_remedy
from rpc_runtime.private_folder import private_folder
from schedules.tuning.database import TuningDatabase
from schedules.tuning.errors import DatabaseError
from tvm_split.errors import TuningError

DATABASE_VARIABLE = "TVM_SPLIT_DATABASE"


def default_folder() -> Path:
    """Return the folder in the environment variable TVM_SPLIT_DATABASE, else ``tuning`` in the cache folder."""
    named = os.environ.get(DATABASE_VARIABLE, "")
    return Path(named) if named else cache_folder("tuning")


def usable_folder(folder: str | Path | None) -> Path:
    """Return a named folder unchecked, since its user trusts it; else the default one, created if it is missing.

    Raises:
        TuningError: the default folder cannot be made, or another user may write to it; its content becomes code.
    """
    named = folder or os.environ.get(DATABASE_VARIABLE)
    if named:
        return Path(named)
    path = default_folder()
    try:
        private_folder(path)
    except OSError as error:
        text = f"cannot keep tuned kernels in {path} {reason_and_remedy(error, f'--database or ${DATABASE_VARIABLE}')}"
        raise TuningError(text) from error
    return path


def open_database(folder: str | Path | None) -> TuningDatabase | None:
    """Open the tuning database of a named or the default folder; None if none is named, and the default one is missing
    or cannot be entered.

    Raises:
        TuningError: the named folder does not exist, another user may write to the default one, or a file is damaged.
    """
    if folder is None and not os.access(default_folder(), os.X_OK):
        return None
    path = usable_folder(folder)
    if not path.is_dir():
        raise TuningError(f"there is no tuning database {path}; `tvm-split tune --database {path}` makes one")
    try:
        return TuningDatabase(path)
    except DatabaseError as error:
        raise TuningError(str(error)) from error
