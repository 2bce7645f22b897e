"""What a process holds: mappings, open files, threads, children."""

import contextlib
from collections import Counter
from pathlib import Path

import psutil


def mappings(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()


def removed_libraries(process_id: int) -> list[str]:
    """Return the mappings of libraries without a file name, such as those of a worker or an in-process cluster."""
    return [line for line in mappings(process_id) if line.endswith(".so (deleted)")]


def open_files(process_id: int | str = "self") -> int:
    """Return the number of open files, without the event descriptors that gRPC opens and closes at any time."""
    return len(_names_of_files(process_id))


def held_by(process_id: int) -> Counter[str]:
    """Return what a process holds, by kind: threads of Python, open files, shared memory with libraries, children."""
    threads = [_name_of(path) for path in Path(f"/proc/{process_id}/task").iterdir()]
    held = Counter({"threads": threads.count(_name_of(Path(f"/proc/{process_id}")))})  # gRPC names its own threads
    held.update(f"open {name.partition(':')[0]}" for name in _names_of_files(process_id))
    held["mappings of shared memory"] = sum("memfd:" in line for line in mappings(process_id))
    held["children"] = len(psutil.Process(process_id).children(recursive=True))
    return held


def _names_of_files(process_id: int | str) -> list[str]:
    names = []
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            names.append(str(path.readlink()))
    return [name for name in names if not name.startswith("anon_inode:[event")]


def _name_of(folder: Path) -> str:
    try:
        return (folder / "comm").read_text()
    except OSError:  # a thread has just ended
        return ""
