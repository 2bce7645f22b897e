"""``tvm-split cache``: the data kept on this host between runs."""

from __future__ import annotations

import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rpc_runtime.files import cache_folder, statuses
from tvm_split.cli import options
from tvm_split.cli.source import load_tvm
from tvm_split.display.console import STDOUT, print_json
from tvm_split.units import age_text, bytes_text, count_text

if TYPE_CHECKING:
    from tvm_split.profiling.store import StoreFile


def cache(
    action: Annotated[Literal["show", "clear"], typer.Argument(metavar="show|clear", show_default=False)],
    json: bool = options.JSON,
) -> None:
    """Show what is kept, or remove measurements and compiled stages, so that the next plan measures and compiles again.

    Tuned kernels and blobs (of workers and compiled stages) are shown as well, but never removed: tuning takes hours,
    and blobs have a limit.

    Example: tvm-split cache show
    """
    load_tvm()
    from tvm_split.compiler import build_cache, kernel_objects, tuning_folder
    from tvm_split.profiling import store

    measured = store.store_files(store.default_folder())
    other_folders = {"tuned kernels": tuning_folder.default_folder(), "workers' blobs": cache_folder("blobs")}
    compiled, kernels = (list(part.default_folder().glob("*")) for part in (build_cache, kernel_objects))
    if action == "clear":
        for path in (*(entry.path for entry in measured), *compiled, *kernels):
            with suppress(IsADirectoryError):  # which nothing here has made
                path.unlink(missing_ok=True)
    if json:
        print_json(
            {
                "action": action,
                "measurements": [
                    {"path": str(entry.path), **entry.subject, "measured_at": entry.measured_at} for entry in measured
                ],
                "compiled": len(compiled),
                "kernels": len(kernels),
                "others": {
                    name: {"path": str(folder), "bytes": _size(folder)} for name, folder in other_folders.items()
                },
            }
        )
        return
    done = "removed" if action == "clear" else "kept"
    whole = bytes_text(sum(entry.size_bytes for entry in measured))
    lines = [
        *map(_line, measured),
        f"measurements: {whole} {done} in {store.default_folder()}",
        f"results of compiling: {len(compiled)} {done} in {build_cache.default_folder()}",
        f"compiled kernels: {len(kernels)} {done} in {kernel_objects.default_folder()}",
        *(f"{name}: {bytes_text(_size(folder))} kept in {folder}" for name, folder in other_folders.items()),
    ]
    for line in lines:
        STDOUT.print(line, markup=False, highlight=False, soft_wrap=True)  # unwrapped, so that paths can be copied


def _line(entry: StoreFile) -> str:
    if not entry.measured_at:
        return f"{entry.path.name}: cannot be read, and is measured again"
    of = f"links from {entry.subject.get('links from')}"
    if "machine" in entry.subject:
        of = f"{entry.subject['machine']} on {entry.subject.get('hostname')}, threads: {entry.subject.get('threads')}"
    count, age = count_text(len(entry.measured_at), "measurement"), age_text(time.time() - min(entry.measured_at))
    return f"{of}: {count}, up to {age} old"


def _size(folder: Path) -> int:
    return sum(status.st_size for _, status in statuses(folder.rglob("*")) if stat.S_ISREG(status.st_mode))
