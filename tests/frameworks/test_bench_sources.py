"""The benchmark of sources, on networks that are compiled at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

import tvm_split
from scripts.bench_sources import compare
from tests.helpers.frontends.tflite_networks import network


def test_every_source_has_its_figures(tmp_path: Path) -> None:
    sources = {
        "torch": partial(tvm_split.load_model, torch.nn.Conv2d(3, 4, 3).eval(), (torch.zeros(1, 3, 8, 8),)),
        "tflite": partial(tvm_split.load_model, network(), batch=1),
    }
    for rounds in (1, 2):  # the second time they are compiled already
        found = compare(sources, tmp_path, rounds)
        assert {name: len(figures) for name, figures in found.items()} == {"torch": rounds, "tflite": rounds}
        assert all(each["seconds"] > 0 for figures in found.values() for each in figures)
