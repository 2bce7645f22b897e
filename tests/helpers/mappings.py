"""What a process has mapped into its memory."""

from __future__ import annotations

from pathlib import Path


def mappings(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()


def removed_libraries(process_id: int) -> list[str]:
    """Mappings of libraries whose file has no name, as of all that a worker or an in-process cluster loads."""
    return [line for line in mappings(process_id) if line.endswith(".so (deleted)")]
