"""Registries of implementations by name: built-in ones, and plug-ins that installed packages add by entry points."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rpc_runtime.errors import InputError, TvmSplitError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = TypeVar("Kind")


class PluginError(TvmSplitError):
    """A plug-in cannot be used; the message names its package and its kind."""


class PluginWarning(UserWarning):
    """A plug-in is left out; the message names its package and the reason."""


@dataclass(eq=False)
class Registry(Generic[Kind]):
    """Kinds (implementations) by name; a kind's module is imported when the kind is first used.

    Iterating yields the names without importing: the built-in ones in their order, then plug-ins, sorted.

    Args:
        group: the group of entry points, such as ``tvm_split.transports``. A plug-in cannot replace a built-in kind.
        noun: the name of a kind in messages, such as ``transport``.
        built_in: the kinds by name, each as an object or as ``module:attribute``.
        base: the class that each kind must be a subclass of.
        unknown: the error class for an unknown name.
        instances: each kind must be an instance of ``base``, not a subclass.
    """

    group: str
    noun: str
    built_in: Mapping[str, Kind | str]
    base: type | None = None
    unknown: type[TvmSplitError] = InputError
    instances: bool = field(default=False, kw_only=True)
    _loaded: dict[str, Kind] = field(default_factory=dict, init=False)

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from sorted(self._plugins())

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._plugins()

    def __getitem__(self, name: str) -> Kind:
        """Return the kind of this name.

        Raises:
            TvmSplitError: the name is unknown (class ``unknown``); the message lists the known names.
            PluginError: the kind is a plug-in that cannot be loaded.
        """
        if name not in self._loaded:
            self._loaded[name] = self._built_in_kind(name) if name in self.built_in else self._plugin_kind(name)
        return self._loaded[name]

    def items(self) -> Iterator[tuple[str, Kind]]:
        """Yield the name and kind of all kinds that can be loaded; issue a `PluginWarning` for each other kind."""
        for name in self:
            try:
                yield name, self[name]
            except PluginError as error:
                warnings.warn(str(error), PluginWarning, stacklevel=2)

    @contextlib.contextmanager
    def blamed(self, name: str, *documented: type[Exception]) -> Iterator[None]:
        """Convert errors of the body, which uses a plug-in, to a `PluginError`, and issue a `PluginWarning`.

        ``documented`` errors, which the plug-in may raise, and those of built-in kinds pass unchanged.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if name in self.built_in or isinstance(error, (PluginError, *documented)):
                raise
            broken = self._broken(self._plugins()[name], f"failed: {error!r}")
            warnings.warn(str(broken), PluginWarning, stacklevel=3)
            raise broken from error

    def _broken(self, entry: EntryPoint, what: str) -> PluginError:
        package = entry.dist.name if entry.dist else entry.module
        return PluginError(
            f"the {self.noun} {entry.name!r} of the package {package!r} {what}; update the package, or uninstall it"
        )

    def _built_in_kind(self, name: str) -> Kind:
        kind: Any = self.built_in[name]
        if isinstance(kind, str):
            module, _, attribute = kind.partition(":")
            kind = getattr(importlib.import_module(module), attribute)
        return self._checked(kind)

    def _plugin_kind(self, name: str) -> Kind:
        if (entry := (plugins := self._plugins()).get(name)) is None:
            known = ", ".join([*self.built_in, *sorted(plugins)])
            raise self.unknown(f"there is no {self.noun} {name!r}; there are: {known}")
        try:
            return self._checked(entry.load())
        except (Exception, SystemExit) as error:
            raise self._broken(entry, f"cannot be loaded from {entry.value}: {error}") from error

    def _checked(self, kind: Kind) -> Kind:
        base = self.base
        if base and not (
            isinstance(kind, base) if self.instances else isinstance(kind, type) and issubclass(kind, base)
        ):
            raise TypeError(f"{kind!r} is not {'of the class' if self.instances else 'a subclass of'} {base.__name__}")
        if missing := getattr(kind, "__abstractmethods__", ()):
            raise TypeError(f"{kind!r} does not define {', '.join(sorted(missing))}")
        return kind

    def _plugins(self) -> dict[str, EntryPoint]:
        found = _entries(self.group, tuple(sys.path))
        return {entry.name: entry for entry in found if entry.name not in self.built_in}


@cache
def _entries(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of the packages on a path; to look takes 2 ms with 100 packages."""
    from importlib.metadata import entry_points  # takes 40 ms, and is not needed for the built-in kinds

    return tuple(entry_points(group=group))
