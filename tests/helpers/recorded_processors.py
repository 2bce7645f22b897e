"""Texts of /proc/cpuinfo recorded on real machines: a processor's first entry, without values that change."""

from pathlib import Path

FOLDER = Path(__file__).parent / "cpuinfo"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))


def recorded(name: str) -> tuple[str, str]:
    """The architecture of a recorded machine, as ``platform.machine()`` returns it, and its /proc/cpuinfo."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    if "armv7l" in name:
        return "armv7l", text
    return ("aarch64" if "Features" in text else "x86_64"), text
