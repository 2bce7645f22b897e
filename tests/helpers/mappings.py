"""What a process holds: mappings, open files, threads, children."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil


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


@dataclass(frozen=True)
class Held:
    """What a process holds: threads, open files, shared memory and loaded libraries, children."""

    threads: int
    files: int
    memory: int
    children: int

    def more_than(self, before: Held, threads: int = 0) -> str:
        """Return what this is more than before, as text."""
        slack = Held(threads, 0, 0, 0)
        pairs = {name: (getattr(before, name) + getattr(slack, name), value) for name, value in vars(self).items()}
        return ", ".join(f"{value} {name} instead of {most}" for name, (most, value) in pairs.items() if value > most)


def held_by(process: int) -> Held:
    """Return what a process holds; of its threads only those of Python, because gRPC's own come and go."""
    names = [_name_of(path) for path in Path(f"/proc/{process}/task").iterdir()]
    own = _name_of(Path(f"/proc/{process}"))
    memory = [line for line in mappings(process) if "memfd:" in line]
    return Held(names.count(own), open_files(process), len(memory), len(psutil.Process(process).children(True)))


def _name_of(folder: Path) -> str:
    try:
        return (folder / "comm").read_text()
    except OSError:  # a thread has just ended
        return ""
