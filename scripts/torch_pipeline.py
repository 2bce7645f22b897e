"""ResNet-50 over torch.distributed.pipelining, one of two ranks on one core: a partner of `bench_pipelining`.

``python -m scripts.torch_pipeline RANK ADDRESS:PORT CORE``

The network is cut where its two parts take most nearly the same time on this machine, as rank 0 measures it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from scripts.partner import answer_requests
from tests.models import torch_models

RANKS = 2
TIMED_RUNS = 5


class Sendable(nn.Module):
    """A part whose result gloo can send: dense in the usual order."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.part(x)
        return result.contiguous()


def pieces_of(network: Any) -> list[nn.Module]:
    """A ResNet as pieces that follow one another: its stem, every block, and its head."""
    stem = nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool)
    head = nn.Sequential(network.avgpool, nn.Flatten(1), network.fc)
    return [stem, *(block for index in range(4) for block in getattr(network, f"layer{index + 1}")), head]


def even_cut(pieces: list[nn.Module], x: torch.Tensor) -> int:
    """How many pieces the first part should have."""
    times: list[list[float]] = [[] for _ in pieces]
    for _ in range(TIMED_RUNS):
        value = x
        for piece, found in zip(pieces, times, strict=True):
            start = time.perf_counter()
            value = piece(value)
            found.append(time.perf_counter() - start)
    seconds = [statistics.median(found) for found in times]
    return min(range(1, len(pieces)), key=lambda cut: max(sum(seconds[:cut]), sum(seconds[cut:])))


class Rank:
    """One end of the pipeline; both are asked the same at the same time."""

    def __init__(self, rank: int, address: str) -> None:
        build, (self._x,) = torch_models.published_models()["resnet50"]
        distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=RANKS)
        self._rank = rank
        pieces = pieces_of(build().to(memory_format=torch.channels_last))
        cut = torch.zeros(1, dtype=torch.int64)
        if rank == 0:
            cut[0] = even_cut(pieces, self._x)
        distributed.broadcast(cut, 0)
        self._cut = int(cut)
        self._whole = nn.Sequential(*pieces)
        self._part = Sendable(nn.Sequential(*(pieces[: self._cut] if rank == 0 else pieces[self._cut :])))
        self._schedules: dict[int, ScheduleGPipe] = {}

    def answer(self, micro_batches: int, seconds: float) -> dict[str, Any]:
        """Step after step for about so long, after two that do not count; 0: each rank computes the whole by itself.

        Rank 1 has the outputs of a micro-batch.
        """
        if micro_batches:
            step = partial(self._step, self._schedule(micro_batches), self._x.repeat(micro_batches, 1, 1, 1))
        else:
            step = partial(self._whole, self._x)
        step()
        distributed.barrier()
        start = time.perf_counter()
        step()
        distributed.barrier()
        # Both do as many steps, and nothing makes them wait for one another in between.
        count = torch.tensor([max(1, round(seconds / (time.perf_counter() - start)))])
        distributed.broadcast(count, 0)
        start = time.perf_counter()
        for _ in range(int(count)):
            result = step()
        distributed.barrier()
        per_second = int(count) * max(1, micro_batches) / (time.perf_counter() - start)
        return {"per_second": per_second, "cut": self._cut, "output": None if result is None else result[0].tolist()}

    def _schedule(self, micro_batches: int) -> ScheduleGPipe:
        """A schedule keeps the buffers of its stage, which are those of so many micro-batches."""
        if micro_batches not in self._schedules:
            stage = PipelineStage(self._part, self._rank, RANKS, torch.device("cpu"))
            self._schedules[micro_batches] = ScheduleGPipe(stage, micro_batches)
        return self._schedules[micro_batches]

    def _step(self, schedule: ScheduleGPipe, x: torch.Tensor) -> torch.Tensor | None:
        """An inference of all micro-batches."""
        found: torch.Tensor | None = schedule.eval(x) if self._rank == 0 else schedule.eval()
        return found


def main(rank: str, address: str, core: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    with torch.inference_mode():
        answer_requests(Rank(int(rank), address).answer)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
