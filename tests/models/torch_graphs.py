"""Small torch networks whose graphs are no chains."""

import torch
from torch import nn


class Skip(nn.Module):
    """A skip connection over a stage, and back to the machine it started from."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return self.last(x + torch.relu(self.middle(x)))


class TwoConsumers(nn.Module):
    """One tensor that two later stages need, on one machine or on two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.join = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        left = torch.tanh(self.left(x))
        return self.join(torch.cat([left, self.right(x) * left], dim=1))


class TwoInputs(nn.Module):
    """Inputs that enter at different stages, one of them an integer, and one that goes straight to an output."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(5, 8)
        self.words = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, word: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.head(torch.relu(self.image(x)) * self.words(word)), y, word


class SeveralOutputs(nn.Module):
    """Outputs that leave from different stages, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 5)
        self.third = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.relu(self.first(x))
        second = torch.relu(self.second(first))
        third = self.third(second)
        return third, first, second, third


class Scalars(nn.Module):
    """A tensor without dimensions as an input, a weight, between stages, and as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scalar: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = (self.first(x) * scalar * self.scale).sum()
        return self.last(x) * total, total, scalar


class Constants(nn.Module):
    """Outputs that no layer computes: a table, a scalar and an input, beside computed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("step", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.table, self.second(self.first(x)), x, self.step, self.table + 1


class OnlyConstants(nn.Module):
    """Two outputs, and nothing that depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.table, self.table[1]


class Swap(nn.Module):
    """The inputs in another order, one of them without dimensions, and one twice."""

    def forward(self, x: torch.Tensor, scalar: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return scalar, x, scalar
