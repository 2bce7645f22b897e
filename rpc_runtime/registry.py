"""Kinds of one thing by name: those built in, and those that installed packages add by entry points."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rpc_runtime.errors import InputError, TvmSplitError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = TypeVar("Kind")


class PluginError(TvmSplitError):
    """An installed package adds a kind that cannot be used; the message names the package and the kind."""


class PluginWarning(UserWarning):
    """A kind that an installed package adds is left out; the message names the package and says why."""


class Registry(Generic[Kind]):
    """The kinds of one thing by name; a kind's module is imported when the kind is first asked for.

    Iterating gives the names, without importing a kind: the built-in ones in their order, then the others sorted.

    Args:
        group: the group of entry points, ``tvm_split.transports``. A plug-in cannot replace a built-in kind.
        noun: what messages call a kind, ``transport``.
        built_in: by name the kind itself, or where it is as ``module:attribute``.
        base: what each kind must be an instance or a subclass of.
        unknown: what is raised for a name that is not there.
    """

    def __init__(
        self,
        group: str,
        noun: str,
        built_in: Mapping[str, Kind | str],
        base: type | None = None,
        unknown: type[TvmSplitError] = InputError,
    ) -> None:
        self._group = group
        self._noun = noun
        self._built_in = dict(built_in)
        self._base = base
        self._unknown = unknown
        self._loaded: dict[str, Kind] = {}

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from sorted(self._plugins())

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._plugins()

    def __getitem__(self, name: str) -> Kind:
        """The kind of this name.

        Raises:
            TvmSplitError: there is none, of the class ``unknown``; the message lists those that there are.
            PluginError: an installed package adds it, and it cannot be loaded.
        """
        if name not in self._loaded:
            self._loaded[name] = self._built_in_kind(name) if name in self._built_in else self._plugin_kind(name)
        return self._loaded[name]

    def items(self) -> Iterator[tuple[str, Kind]]:
        """All kinds with their names; of those that cannot be loaded, a `PluginWarning` each."""
        for name in self:
            try:
                yield name, self[name]
            except PluginError as error:
                warnings.warn(str(error), PluginWarning, stacklevel=2)

    def _built_in_kind(self, name: str) -> Kind:
        kind: Any = self._built_in[name]
        if isinstance(kind, str):
            module, _, attribute = kind.partition(":")
            kind = getattr(importlib.import_module(module), attribute)
        return self._checked(kind)

    def _plugin_kind(self, name: str) -> Kind:
        if (entry := self._plugins().get(name)) is None:
            raise self._unknown(f"there is no {self._noun} {name!r}; there are: {', '.join(self)}")
        try:
            return self._checked(entry.load())
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.module
            raise PluginError(
                f"the {self._noun} {name!r} of the package {package!r} cannot be loaded from {entry.value}: {error}; "
                "update the package, or uninstall it"
            ) from error

    def _checked(self, kind: Kind) -> Kind:
        base = self._base
        if base and not (isinstance(kind, base) or (isinstance(kind, type) and issubclass(kind, base))):
            raise TypeError(f"{kind!r} is no {base.__name__}")
        return kind

    def _plugins(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # takes 40 ms, and is not needed for the built-in kinds

        return {entry.name: entry for entry in entry_points(group=self._group) if entry.name not in self._built_in}
