"""The view of a worker kit."""

from typing import Any

from tvm_split.display.view import Table, View, as_json, view
from tvm_split.units import bytes_text
from tvm_split.worker_kit.kit import WorkerKit


@as_json.register
def kit_as_json(kit: WorkerKit) -> dict[str, Any]:
    """Return the kit, its platform and its packages as JSON values."""
    return {
        "output": str(kit.path),
        "device": kit.device,
        "architecture": kit.platform.architecture,
        "python": ".".join(map(str, kit.platform.python)),
        "glibc": f"2.{kit.glibc_minor}",
        "size_bytes": kit.size_bytes,
        "packed_bytes": kit.packed_bytes,
        "parts": [
            {"name": part.name, "version": part.version, "files": part.files, "size_bytes": part.size_bytes}
            for part in kit.parts
        ],
    }


@view.register
def view_of_kit(kit: WorkerKit, *, details: bool = False) -> View:
    """Return the packages of the kit, the largest first."""
    largest_first = sorted(kit.parts, key=lambda part: -part.size_bytes)
    rows = [(part.name, part.version, str(part.files), bytes_text(part.size_bytes)) for part in largest_first]
    rows.append(("all", "", str(sum(part.files for part in kit.parts)), bytes_text(kit.size_bytes)))
    python = ".".join(map(str, kit.platform.python))
    title = f"{kit.path.name}: a worker for {kit.device} on {kit.platform.architecture}, Python {python}"
    packed = "" if kit.packed_bytes is None else f"packed: {bytes_text(kit.packed_bytes)}; "
    caption = f"{packed}needs Linux with glibc 2.{kit.glibc_minor} or newer"
    return [Table(title, ("package", "version"), ("files", "size"), rows, caption)]
