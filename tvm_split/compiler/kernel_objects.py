"""Compile kernels to object files, each once: an object is kept by its kernel's content name, its target and versions.

A kernel that was timed for planning is linked into its stage as it is, and so are the kernels of another cut of the
network, and equal kernels of other networks.
"""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tvm import tirx

from rpc_runtime.files import cache_folder
from tvm_split.compiler.build_cache import keep_contents, kept_content, key_of
from tvm_split.compiler.kernel_processes import compiled_objects
from tvm_split.progress import show_part

MOST_KEPT = 20_000
"""The most objects in the cache: those of some hundred networks, of about ten kilobytes each."""


def default_folder() -> Path:
    """Return the folder that has one file per object."""
    return cache_folder("kernels")


def kernel_objects(
    names: Collection[str],
    target: Mapping[str, Any],
    kernels: Callable[[], Mapping[str, tirx.PrimFunc]],
    deadline: float = math.inf,
) -> dict[str, bytes]:
    """Return the object file of each scheduled kernel, by its content name, under which the object exports it.

    A kernel does not check its arguments: that would be half of all code and a quarter of the time to compile it.

    Args:
        names: the kernels, the most important ones first.
        kernels: returns at least the kernels whose objects are not kept, by name.
        deadline: no kernel but the first is begun after it, in seconds of `time.monotonic`; the result lacks the rest.
    """
    paths = {name: default_folder() / key_of([target], object=name, target=dict(target)) for name in names}
    objects = {name: kept for name, path in paths.items() if (kept := kept_content(path)) is not None}
    missing = [name for name in names if name not in objects]
    if missing:
        functions, count = kernels(), len(missing)
        compiled = compiled_objects(
            {name: functions[name].with_attr("global_symbol", name) for name in missing},
            target,
            deadline,
            lambda done: show_part(f"{done} of {count} kernels built", count + done, 2 * count),
        )
        keep_contents(default_folder(), {paths[name].name: made for name, made in compiled.items()}, MOST_KEPT)
        objects |= compiled
    return objects
