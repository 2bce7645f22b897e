"""The ways in which torch runs a network on a device, each as a function that ends when the device has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Run = Callable[[], Any]
WAYS = ("eager", "channels_last", "graphs", "compile")
"""``graphs`` are CUDA graphs, recorded of the eager network."""
QUICK = WAYS[:3]
"""Those that take no minute before the first run."""
WARM_UP_RUNS = 3
LONGEST_WORDS = 200


class TorchWays:
    """A network and its inputs, of one dtype, on a device: ``cpu`` or ``cuda``."""

    def __init__(self, network: torch.nn.Module, inputs: Sequence[torch.Tensor], device: str) -> None:
        self._device = device
        self._network = network.to(device)
        self._inputs = [each.to(device) for each in inputs]

    def each(self, names: Sequence[str]) -> Iterator[tuple[str, Run | str]]:
        """Every way of these by its name, or why it cannot be gone; those that are none of this device are left out."""
        for name in names:
            if (name == "channels_last" and self._inputs[0].ndim != 4) or (name == "graphs" and self._device == "cpu"):
                continue
            try:
                run = self._way(name)
                run()
            except Exception as error:  # a compiler's, of many kinds
                yield name, f"{type(error).__name__}: {error}"[:LONGEST_WORDS]
            else:
                yield name, run

    def _way(self, name: str) -> Run:
        network, inputs = self._network, self._inputs
        if name == "graphs":
            return self._recorded()
        if name == "channels_last":
            network = network.to(memory_format=torch.channels_last)
            inputs = [each.to(memory_format=torch.channels_last) for each in inputs]
        elif name == "compile":
            network = torch.compile(network)

        def run() -> Any:
            with torch.inference_mode():
                result = network(*inputs)
            if self._device == "cuda":
                torch.cuda.synchronize()
            return result

        return run

    def _recorded(self) -> Run:
        """As torch's documents have it: warmed up on a stream of its own, then recorded, and played from then on."""
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm), torch.inference_mode():
            for _ in range(WARM_UP_RUNS):
                self._network(*self._inputs)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            self._network(*self._inputs)

        def run() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return run
