"""Packs workers for the machines that ssh reaches."""

from __future__ import annotations

import hashlib
import threading

from rpc_runtime.scratch import ScratchFolder
from tvm_split.worker_kit.distributions import Platform, needed_versions
from tvm_split.worker_kit.kit import pack, write_kit
from tvm_split.worker_kit.needed_files import own_files


class Kits:
    """The kits of one `tvm-split up`: each is packed once for all machines of its kind. Thread-safe.

    ``digest`` changes with this installation, since a worker must fit the client that deploys to it. ``needs`` are the
    packages that a worker imports, with their versions here.
    """

    def __init__(self) -> None:
        self.needs = needed_versions()
        digest = hashlib.sha256(repr(sorted(self.needs.items())).encode())
        for name, path in sorted(own_files().items()):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.digest = digest.hexdigest()[:16]
        self._lock = threading.Lock()
        self._packed: dict[object, bytes] = {}

    def packed(self, platform: Platform, device: str, has_packages: bool) -> bytes:
        """Return a gzipped tar file of the folder ``kit``; without packages for a Python that has them.

        Raises:
            KitError: pip cannot download a package for the platform.
        """
        key = "" if has_packages else (platform, device)
        with self._lock:
            if key not in self._packed:
                with ScratchFolder("kit") as folder:
                    packed = folder.path / "kit.tar.gz"
                    if has_packages:
                        pack({f"kit/packages/{name}": path for name, path in own_files().items()}, packed)
                    else:
                        write_kit(packed, device, platform)
                    self._packed[key] = packed.read_bytes()
            return self._packed[key]
