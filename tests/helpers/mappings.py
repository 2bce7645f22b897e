"""What a process has mapped into its memory, and what files it has open."""

from __future__ import annotations

import contextlib
from pathlib import Path


def mappings(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()


def removed_libraries(process_id: int) -> list[str]:
    """Mappings of libraries whose file has no name, as of all that a worker or an in-process cluster loads."""
    return [line for line in mappings(process_id) if line.endswith(".so (deleted)")]


def open_files(process_id: int | str = "self") -> int:
    """Without what gRPC waits with, which it opens and closes as it sees fit."""
    count = 0
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this very folder
            count += not str(path.readlink()).startswith("anon_inode:[event")
    return count
