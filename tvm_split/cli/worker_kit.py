"""``tvm-split worker-kit``: all that a worker needs on a machine with a plain Python, as a folder or a tar file."""

from __future__ import annotations

import json as json_module
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.display.console import STDOUT, new_table, print_json, print_note
from tvm_split.progress import step_progress
from tvm_split.units import bytes_text

if TYPE_CHECKING:
    from tvm_split.worker_kit.kit import WorkerKit

PYTHONS = ((3, 11), (3, 12), (3, 13))
DEVICES = {"llvm": "cpu", "cuda": "cuda"}
ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
"""As LLVM's triples begin, and as wheels have them: those that there are wheels of TVM for."""


def worker_kit(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A new folder, or a file that ends with .tar, .tar.gz or .tar.xz.")
    ],
    target: Annotated[
        str,
        typer.Option(
            help="What the worker computes on: llvm, cuda, or a target in JSON, as in a cluster file. "
            "Of it, the kind and the mtriple count."
        ),
    ] = "llvm",
    python: Annotated[
        str | None, typer.Option(metavar="3.12", help="The Python there, 3.11 to 3.13 (default: as this one).")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Pack a worker for a machine without internet, on which nothing but a Python is installed."""
    from tvm_split.worker_kit.distributions import Platform
    from tvm_split.worker_kit.kit import write_kit

    device, architecture = _device_of(target)
    made_for = Platform(_python_of(python), architecture)
    with step_progress("packing a worker") as report:
        kit = write_kit(output, device, made_for, report)
    if json:
        print_json(_description(kit))
    else:
        _print_kit(kit)


def _python_of(text: str | None) -> tuple[int, int]:
    if text is None:
        return sys.version_info[:2]
    for each in PYTHONS:
        if text == f"{each[0]}.{each[1]}":
            return each
    raise WrongUseError(f"a worker runs with Python 3.11, 3.12 or 3.13, got {text!r}", "--python")


def _device_of(text: str) -> tuple[str, str]:
    """The device and the processor of a target."""
    target: Any = {"kind": text}
    if text.lstrip().startswith("{"):
        try:
            target = json_module.loads(text)
        except ValueError as error:
            raise WrongUseError(f"{text!r} is not JSON: {error}", "--target") from error
    device = DEVICES.get(str(target.get("kind")))
    if device is None:
        raise WrongUseError(f"a target's kind is 'llvm' or 'cuda', got {target.get('kind')!r}", "--target")
    cpu = target.get("host", {}) if device == "cuda" else target
    if not isinstance(cpu, Mapping):
        raise WrongUseError(f"a target's host is a target as well, got {cpu!r}", "--target")
    return device, _architecture_of(cpu["mtriple"]) if "mtriple" in cpu else platform.machine()


def _architecture_of(triple: object) -> str:
    """Of a target triple, such as ``aarch64-linux-gnu``: its processor, as ``platform.machine()`` names it."""
    name, _, system = str(triple).partition("-")
    if name not in ARCHITECTURES or not isinstance(triple, str):
        raise WrongUseError(
            f"there are kits for the processors {', '.join(ARCHITECTURES)}, and mtriple is {triple!r}", "--target"
        )
    if system and ("linux" not in system.split("-") or "musl" in system):
        raise WrongUseError(f"a worker runs on Linux with glibc, and mtriple is {triple!r}", "--target")
    return ARCHITECTURES[name]


def _description(kit: WorkerKit) -> dict[str, Any]:
    return {
        "output": str(kit.path),
        "device": kit.device,
        "architecture": kit.platform.architecture,
        "python": ".".join(map(str, kit.platform.python)),
        "glibc": f"2.{kit.glibc_minor}",
        "size_bytes": kit.size_bytes,
        "packed_bytes": kit.packed_bytes,
        "parts": [
            {"name": each.name, "version": each.version, "files": each.files, "size_bytes": each.size_bytes}
            for each in kit.parts
        ],
    }


def _print_kit(kit: WorkerKit) -> None:
    largest_first = sorted(kit.parts, key=lambda part: -part.size_bytes)
    rows = [(part.name, part.version, str(part.files), bytes_text(part.size_bytes)) for part in largest_first]
    rows.append(("all", "", str(sum(part.files for part in kit.parts)), bytes_text(kit.size_bytes)))
    python = ".".join(map(str, kit.platform.python))
    title = f"{kit.path.name}: a worker for {kit.device} on {kit.platform.architecture}, Python {python}"
    packed = "" if kit.packed_bytes is None else f"packed: {bytes_text(kit.packed_bytes)}; "
    caption = f"{packed}needs Linux with glibc 2.{kit.glibc_minor} or newer"
    STDOUT.print(new_table(title, ("package", "version"), ("files", "size"), rows, caption))
    print_note(
        f"there, without internet: {kit.folder}/worker --listen HOST:PORT, with the options of `tvm-split worker`"
    )
