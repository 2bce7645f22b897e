"""The result of one micro-batch: a tuple of arrays that also answers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex, overload

from rpc_runtime.errors import InputError
from rpc_runtime.program.runner import Array


class Outputs(tuple[Array, ...]):
    """A model's outputs in its order; ``outputs["logits"]`` is the output of that name, ``dict(outputs)`` has all.

    ``names`` are the outputs' names in the source, such as keys of a dict; ``output_0``, … for those without one.
    """

    names: tuple[str, ...]

    def __new__(cls, arrays: Iterable[Array], names: Iterable[str]) -> Outputs:
        outputs = super().__new__(cls, arrays)
        outputs.names = tuple(names)
        return outputs

    def __getnewargs__(self) -> tuple[tuple[Array, ...], tuple[str, ...]]:
        return tuple(self), self.names

    @overload
    def __getitem__(self, key: str | SupportsIndex) -> Array: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Array, ...]: ...
    def __getitem__(self, key: Any) -> Any:
        """Return the output of a name or position. Raises an InputError if no output has that name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            raise InputError(f"no output is named {key!r}; the outputs are {', '.join(self.names)}")
        return super().__getitem__(self.names.index(key))

    def __contains__(self, item: object) -> bool:
        return item in self.names if isinstance(item, str) else super().__contains__(item)

    def keys(self) -> tuple[str, ...]:
        """Return the names, so that ``dict(outputs)`` and ``numpy.savez(path, **outputs)`` work."""
        return self.names

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={array!r}' for name, array in zip(self.names, self, strict=True))})"
