"""Which tuning database `compile` and `tune` use when none is named."""

from __future__ import annotations

import os
from pathlib import Path

from tvm_split.errors import TuningError
from tvm_split.rpc_runtime.files import cache_folder
from tvm_split.schedules.tuning import DatabaseError, TuningDatabase

DATABASE_VARIABLE = "TVM_SPLIT_DATABASE"


def default_folder() -> Path:
    """The folder of the environment variable TVM_SPLIT_DATABASE, else ``tuning`` where all is kept between runs."""
    named = os.environ.get(DATABASE_VARIABLE, "")
    return Path(named) if named else cache_folder("tuning")


def open_database(folder: str | Path | None) -> TuningDatabase | None:
    """What was tuned, from a named folder or the default one; None where nothing was named and nothing is there.

    Raises:
        TuningError: the named folder does not exist, or a file in it is damaged.
    """
    path = Path(folder) if folder is not None else default_folder()
    if not path.is_dir():
        if folder is None:
            return None
        raise TuningError(f"there is no tuning database {path}; `tvm-split tune --database {path}` makes one")
    try:
        return TuningDatabase(path)
    except DatabaseError as error:
        raise TuningError(str(error)) from error
