"""``tvm-split worker-kit``: pack a worker for a machine with a plain Python, as a folder or a tar file."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError, target_of
from tvm_split.display.console import print_note
from tvm_split.display.view import write
from tvm_split.progress import step_progress
from tvm_split.worker_kit.distributions import Platform
from tvm_split.worker_kit.kit import write_kit

DEVICES = {"llvm": "cpu", "cuda": "cuda"}
ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
"""The processors with wheels of TVM: their names in LLVM's target triples, and in wheels."""


def worker_kit(
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="A new folder, or a file that ends with .tar, .tar.gz or .tar.xz.",
            callback=options.require_parent,
        ),
    ],
    target: str = option(
        "llvm",
        "What the worker computes on: llvm, cuda, or a target in JSON, as in a cluster file. Of it, the kind and the "
        "mtriple count.",
    ),
    python: Literal["3.11", "3.12", "3.13"] | None = option(None, "The Python there (default: as this one)."),
    json: bool = options.JSON,
) -> None:
    """Pack a worker for a machine without internet, on which nothing but a Python is installed.

    Example: tvm-split worker-kit worker.tar.gz --target llvm
    """
    device, architecture = _device_of(target)
    made_for = Platform(sys.version_info[:2] if python is None else (3, int(python[2:])), architecture)
    with step_progress("packing a worker") as report:
        kit = write_kit(output, device, made_for, report)
    write(kit, json=json)
    if not json:
        note = (
            f"there, without internet: {kit.folder}/worker --listen HOST:PORT, with the options of `tvm-split worker`"
        )
        print_note(note)


def _device_of(text: str) -> tuple[str, str]:
    """Return the device and the processor of a target."""
    target = target_of(text)
    device = DEVICES.get(str(target.get("kind")))
    if device is None:
        raise WrongUseError(f"a target's kind is 'llvm' or 'cuda', got {target.get('kind')!r}", "--target")
    cpu = target.get("host", {}) if device == "cuda" else target
    if not isinstance(cpu, Mapping):
        raise WrongUseError(f"a target's host is a target as well, got {cpu!r}", "--target")
    return device, _architecture_of(cpu["mtriple"]) if "mtriple" in cpu else platform.machine()


def _architecture_of(triple: object) -> str:
    """Return the processor of a target triple such as ``aarch64-linux-gnu``, as ``platform.machine()`` names it."""
    name, _, system = str(triple).partition("-")
    if name not in ARCHITECTURES or not isinstance(triple, str):
        raise WrongUseError(
            f"there are kits for the processors {', '.join(ARCHITECTURES)}, and mtriple is {triple!r}", "--target"
        )
    if system and ("linux" not in system.split("-") or "musl" in system):
        raise WrongUseError(f"a worker runs on Linux with glibc, and mtriple is {triple!r}", "--target")
    return ARCHITECTURES[name]
