"""``tvm-split cache``: show or clear the data kept on this host between runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tvm_split.cli import options
from tvm_split.display.console import STDOUT, print_json
from tvm_split.units import age_text, bytes_text

if TYPE_CHECKING:
    from tvm_split.profiling.store import Kept


def cache(
    action: Annotated[Literal["show", "clear"], typer.Argument(metavar="show|clear", show_default=False)],
    json: options.JsonOption = False,
) -> None:
    """Show the stored measurements of machines and links, or remove them, so that the next plan measures again.

    Tuned kernels and the blobs that workers on this host received are shown as well, but never removed: tuning takes
    hours, and workers limit their own caches.

    Example: tvm-split cache show
    """
    from rpc_runtime.files import cache_folder
    from tvm_split.compiler import tuning_folder
    from tvm_split.profiling import store

    measured = store.kept(store.default_folder())
    others = {"tuned kernels": tuning_folder.default_folder(), "workers' blobs": cache_folder("blobs")}
    if action == "clear":
        for each in measured:
            each.path.unlink(missing_ok=True)
    if json:
        print_json(
            {
                "action": action,
                "measurements": [
                    {"path": str(each.path), **each.subject, "measured_at": each.measured_at} for each in measured
                ],
                "others": {name: {"path": str(folder), "bytes": _size(folder)} for name, folder in others.items()},
            }
        )
        return
    done = "removed" if action == "clear" else "kept"
    whole = bytes_text(sum(each.size_bytes for each in measured))
    lines = [
        *map(_line, measured),
        f"measurements: {whole} {done} in {store.default_folder()}",
        *(f"{name}: {bytes_text(_size(folder))} kept in {folder}" for name, folder in others.items()),
    ]
    for line in lines:
        STDOUT.print(line, markup=False, highlight=False, soft_wrap=True)  # unwrapped, so that paths can be copied


def _line(each: Kept) -> str:
    if not each.measured_at:
        return f"{each.path.name}: cannot be read, and is measured again"
    of = f"links from {each.subject.get('links from')}"
    if "machine" in each.subject:
        of = f"{each.subject['machine']} on {each.subject.get('hostname')}, threads: {each.subject.get('threads')}"
    return f"{of}: {len(each.measured_at)} measurements, up to {age_text(time.time() - min(each.measured_at))} old"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
