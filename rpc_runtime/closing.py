"""What is closed: at the end of a ``with``, and all of it, whatever fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Self


class Closing(ABC):
    """A context manager that gives itself."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def do_all(steps: Iterable[Callable[[], object]]) -> Exception | None:
    """Takes each step, also after others have failed; the first error."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            first = first or error
    return first
