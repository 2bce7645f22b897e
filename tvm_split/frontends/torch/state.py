"""Find out whether a module keeps state in Python attributes from one call to the next."""

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_OF_TORCH = ("_parameters.", "_buffers.", "_modules.")
"""Containers of modules in which torch.export itself observes tensors."""
_OF_OTHERS = {*sys.stdlib_module_names, "torch", "numpy"}
"""Packages whose objects and classes hold no state of the user's network."""


class _Snapshot:
    """What the attributes of a module's parts and their classes hold now, with nested containers and objects."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(path, container, _entries(container)) for path, container in _containers(module)]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are neither parameters nor buffers."""
        values = [value for path, _, old in self._held if not path.endswith(_OF_TORCH) for value in old.values()]
        return [value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)]

    def changes(self) -> list[tuple[str, Any, Any]]:
        """The path, container and key of each entry that was added, changed or removed since the snapshot."""
        return [
            (f"{path}{key}", container, key)
            for path, container, old in self._held
            for key in _changed(container, old)
            if not (path.endswith(_OF_TORCH) and isinstance(old.get(key), torch.Tensor))
        ]

    def restore(self) -> None:
        for _, container, old in self._held:
            changed = _changed(container, old)
            if isinstance(container, type):
                for key in changed:
                    setattr(container, key, old[key]) if key in old else delattr(container, key)
            elif changed:
                container.clear()
                add = getattr(container, "extend", None) or container.update
                add(old if isinstance(container, dict) else old.values())


def _entries(container: Any) -> dict[Any, Any]:
    items = vars(container) if isinstance(container, type) else container
    return dict(items if hasattr(items, "items") else enumerate(items))


def _changed(container: Any, old: dict[Any, Any]) -> list[Any]:
    now = _entries(container)
    return [key for key in {**old, **now} if now.get(key, now) is not old.get(key, old)]


def _containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the containers and classes in which a module's parts, and their hooks, can keep state, with their paths."""
    waiting: list[tuple[str, Any]] = [(f"{path}." if path else "", part) for path, part in module.named_modules()]
    seen: dict[int, Any] = {}
    while waiting:
        path, value = waiting.pop()
        if seen.setdefault(id(value), path) is not path:
            continue
        if isinstance(value, MethodType):
            waiting.append((path, value.__self__))
        elif isinstance(value, FunctionType) and _is_users(value):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            waiting += [(f"{path}{name}.", cell.cell_contents) for name, cell in cells]
        elif type(value) in _CONTAINERS or isinstance(value, tuple | type):
            waiting += [(f"{path}{key}.", entry) for key, entry in _entries(value).items()]
            if not isinstance(value, tuple):
                yield path, value
        elif hasattr(value, "__dict__") and (isinstance(value, nn.Module) or _is_users(type(value))):
            waiting += [(path, vars(value)), *((path, kind) for kind in type(value).__mro__ if _is_users(kind))]


def _is_users(kind: type | FunctionType) -> bool:
    return kind.__module__.partition(".")[0] not in _OF_OTHERS


class _Unreadable(torch.Tensor):  # type: ignore[misc]
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a call reads what an earlier one has written")


@contextmanager
def _restored(module: nn.Module, buffers: list[torch.Tensor]) -> Iterator[_Snapshot]:
    """Restore the module's attributes and the values of its tensors after the block; yields a snapshot of them."""
    snapshot = _Snapshot(module)
    tensors = [tensor for tensor in (*buffers, *snapshot.tensors()) if not tensor.is_inference()]
    values = [(tensor, tensor._version, tensor.clone()) for tensor in tensors]
    try:
        yield snapshot
    finally:
        snapshot.restore()
        for tensor, version, value in values:
            if tensor._version != version:
                tensor.copy_(value)


@contextmanager
def watched(module: nn.Module) -> Iterator[set[str]]:
    """Restore the module's attributes after the block; yields the set of attributes that calls inside it change."""
    calls: list[_Snapshot] = []
    changed: set[str] = set()
    kinds = {kind.__module__.partition(".")[0] for part in module.modules() for kind in type(part).__mro__}
    if "keras" in kinds:  # the importer of Keras networks checks their state, and Keras tracks its own containers
        yield changed
        return
    with _restored(module, []):
        module.register_forward_pre_hook(lambda *_: calls.append(_Snapshot(module)), prepend=True)
        module.register_forward_hook(lambda *_: changed.update(path for path, *_ in calls.pop().changes()))
        yield changed


def state_of(module: nn.Module, arguments: Any) -> list[str]:
    """Return the attributes from which a call may read what an earlier call has written.

    Attributes that the second of two calls with other inputs changes are made unreadable, and the next call has to
    give the same outputs as a first call. So attributes that are only written, or filled once with values that do not
    depend on the inputs, are not state.
    """

    def run(change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> list[Any]:
        positional, keyword = pytree.tree_map_only(torch.Tensor, change, arguments)
        return list(pytree.tree_leaves(module(*positional, **keyword)))

    with _restored(module, list(module.buffers())) as first:
        changes: list[Any] = []
        try:
            expected = run()
            changes = first.changes()
            first.restore()
            run(_with_other_values)
            second = _Snapshot(module)
            run(_with_other_values)
            changes = second.changes() or changes
            for _, container, key in second.changes():
                put = setattr if isinstance(container, type) else type(container).__setitem__
                put(container, key, _Unreadable())
            torch.testing.assert_close(run(), expected, equal_nan=True)
            return []
        except Exception:
            return [path for path, *_ in changes]


def _with_other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of other values, which are valid indices if those of ``tensor`` are."""
    flipped = tensor.flip(list(range(tensor.dim())))
    return flipped + 1 if tensor.is_floating_point() else flipped
