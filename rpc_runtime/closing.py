"""What is used in a ``with``, at whose end it is closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
