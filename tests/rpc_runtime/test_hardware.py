"""The level of a processor from its features."""

from __future__ import annotations

import platform

import pytest

from tvm_split.rpc_runtime.hardware import _V2, _V3, _V4, cpu_features, mcpu


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (frozenset(), "x86-64"),
        (_V2, "x86-64-v2"),
        (_V2 | _V3, "x86-64-v3"),
        (_V2 | _V4, "x86-64-v2"),
        (_V2 | _V3 | _V4, "x86-64-v4"),
    ],
)
def test_levels(features: frozenset[str], level: str) -> None:
    assert mcpu("x86_64", frozenset(features)) == level


def test_other_architectures_are_generic() -> None:
    assert mcpu("aarch64", frozenset({"asimd"})) == "generic"


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_this_machine_has_features() -> None:
    assert cpu_features()
