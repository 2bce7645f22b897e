"""A builder that an error leaves says nothing: refusals are ordinary while shards are searched."""

import gc
from collections.abc import Callable

import pytest
from tvm import relax

from relay_passes.ir import new_function, rewrite_main
from tests.helpers.relax_graphs import module_of
from tvm_split.frontends.building import ModelBuilder

X = relax.Var("x", relax.TensorType((1,), "float32"))


def refused(*_: object) -> list[relax.Expr]:
    raise ValueError("refused")


def imported() -> None:
    with ModelBuilder().main(()):
        refused()


@pytest.mark.parametrize(
    "build",
    [
        lambda: new_function("main", [X], refused),
        lambda: rewrite_main(module_of([X], lambda builder: [builder.emit(relax.op.negative(X))]), refused),
        imported,
    ],
    ids=["new", "rewritten", "imported"],
)
def test_a_refusal_is_an_error_alone(capfd: pytest.CaptureFixture[str], build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="refused"):
        build()
    gc.collect()
    assert capfd.readouterr().err == ""
