"""A case of the torch sweep, the list of cases, and their shared inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """``build`` makes a module or a function; ``inputs`` makes its arguments."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]
    tolerance: float | None = None


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(*inputs, **named)


class Group(nn.Module):
    """Several modules, each on inputs of its own."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> Any:
        return [part(*arguments) for part, arguments in zip(self.parts, inputs, strict=True)]


class Cases(list[Case]):
    """The cases of one subject, in order."""

    def module(
        self,
        name: str,
        build: Callable[[], nn.Module],
        *shapes: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
    ) -> None:
        """A layer on normal random inputs of the given shapes."""
        self.append(
            Case(name, lambda: build().to(dtype), lambda: tuple(torch.randn(*s).to(dtype) for s in shapes), tolerance)
        )

    def function(self, name: str, run: Callable[..., Any], *inputs: Any, tolerance: float | None = None) -> None:
        """A function; an input is a shape (normal random float32) or a function that makes the tensor."""

        def make() -> tuple[Any, ...]:
            return tuple(torch.randn(*i) if isinstance(i, tuple) else i() for i in inputs)

        self.append(Case(name, lambda: run, make, tolerance))


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(low, high, shape).to(dtype)


def nonzero_integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    return lambda: (torch.randint(1, high, shape) * (torch.randint(0, 2, shape) * 2 - 1)).to(dtype)


def positive(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(*shape) + 0.1


def unit(*shape: int) -> Callable[[], torch.Tensor]:
    """Uniform in (-0.95, 0.95)."""
    return lambda: torch.rand(*shape) * 1.9 - 0.95


def booleans(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(*shape) > 0.5


def typed(dtype: torch.dtype, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: (torch.randn(*shape) * 3).to(dtype)
