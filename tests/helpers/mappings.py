"""Return the memory mappings and the open files of a process."""

import contextlib
from pathlib import Path


def mappings(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()


def removed_libraries(process_id: int) -> list[str]:
    """Return the mappings of libraries without a file name, such as those of a worker or an in-process cluster."""
    return [line for line in mappings(process_id) if line.endswith(".so (deleted)")]


def open_files(process_id: int | str = "self") -> int:
    """Return the number of open files, without the event descriptors that gRPC opens and closes at any time."""
    count = 0
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            count += not str(path.readlink()).startswith("anon_inode:[event")
    return count
