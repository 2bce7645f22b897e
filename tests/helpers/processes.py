"""What a process has mapped into its memory."""

from __future__ import annotations

from pathlib import Path


def removed_libraries(process_id: int) -> list[str]:
    """Mappings of libraries whose file is gone, as all that are loaded from scratch folders are."""
    lines = Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.endswith(".so (deleted)")]
