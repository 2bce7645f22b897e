"""Loads, compiles and runs several networks at the same time."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np

from tests.helpers.frontends.comparison import run_as_stage
from tvm_split.frontends import load_model

Source = tuple[Any, tuple[np.ndarray, ...]]
"""A network, and inputs for it."""


def assert_same_in_threads(sources: Sequence[Source]) -> None:
    """Threads that begin at the same moment get the layer names and outputs that the networks have one by one."""
    alone = [_loaded_and_run(*source) for source in sources]
    begin = Barrier(len(sources))

    def beside_the_others(source: Source) -> tuple[tuple[str, ...], list[np.ndarray]]:
        begin.wait()
        return _loaded_and_run(*source)

    with ThreadPoolExecutor(len(sources)) as pool:
        together = list(pool.map(beside_the_others, sources))
    for (names, outputs), (right_names, right_outputs) in zip(together, alone, strict=True):
        assert names == right_names
        for output, right in zip(outputs, right_outputs, strict=True):
            np.testing.assert_array_equal(output, right)


def _loaded_and_run(network: Any, inputs: tuple[np.ndarray, ...]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    model = load_model(network, inputs)
    return model.layer_names, run_as_stage(model, inputs)
