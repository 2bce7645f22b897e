"""Quantities as people read them."""

from typing import Any

import pytest
import torch

import tvm_split
from tvm_split.cluster.machine import SharedCores
from tvm_split.units import age_text, bytes_text, count_text, gap_text, number_text, precise_bytes_text, seconds_text


@pytest.mark.parametrize(
    ("text_of", "quantity", "text"),
    [
        *((bytes_text, *case) for case in ((0, "0 B"), (999, "999 B"), (2_560_000, "2.6 MB"), (4e9, "4.0 GB"))),
        *((precise_bytes_text, *case) for case in ((12, "12 B"), (1_234_400, "1.234 MB"), (1_234_600, "1.235 MB"))),
        *((seconds_text, *case) for case in ((2.5, "2.5 s"), (0.0123, "12.3 ms"), (7e-9, "7 ns"), (12345, "12300 s"))),
        *((age_text, *case) for case in ((0, "less than a minute"), (60, "1 minute"), (86400 * 3.9, "3 days"))),
        *((gap_text, *case) for case in ((0.0, "0.00%"), (1e-9, "0.01%"), (0.0123, "1.23%"))),
        *((number_text, *case) for case in ((83.333, "83.33"), (2.5e-5, "0.000025"), (1e9, "1000000000"))),
    ],
)
def test_a_quantity_is_shown_in_few_digits(text_of, quantity, text):
    assert text_of(quantity) == text


def test_a_count_of_one_is_singular():
    assert [count_text(count, "stage") for count in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert count_text(2, "micro-batch") == "2 micro-batches"


A, B = "machine-a", "machine-b"


def test_public_objects_are_short_in_a_console_and_tables_elsewhere() -> None:
    network = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(40))).eval()
    model = tvm_split.load_model(network, (torch.ones(1, 4),))
    cluster = tvm_split.Cluster.in_process(2)
    plan = tvm_split.plan(model, cluster, estimate=True, stages=2)
    bundle = tvm_split.compile(model, plan, verify=False)
    with tvm_split.deploy(bundle, cluster) as deployment:
        deployment.run(torch.ones(1, 4))
        statistics, report = deployment.stats(), deployment.report()
    contents: list[tuple[Any, str]] = [
        (model, "layers"),
        (cluster, B),
        (cluster.start(), B),
        *((staged, "stage_1") for staged in (plan, bundle, deployment, statistics)),
        (report, "predicted"),
        (tvm_split.simulate(plan), "compute"),
        (cluster.machines[0], A),
        (tvm_split.Link(A, B, 1e6, 0.1), "1000000"),
        (SharedCores((A, B), 2), B),
        (tvm_split.Shard("0", "1", "rows", {A: 0.5, B: 0.5}), "rows"),
        (tvm_split.PlanRequest(stages=2, pin={"0": A}), "stages"),
    ]
    for shown, content in contents:
        assert len(repr(shown)) < 160
        assert "\n" not in repr(shown)
        assert type(shown).__name__ in repr(shown)
        assert content in str(shown)
        assert content in shown._repr_html_()
        assert max(map(len, str(shown).splitlines())) <= 80


def test_fields_with_their_defaults_are_left_out() -> None:
    assert repr(tvm_split.Machine(A, threads=4)) == "Machine(name='machine-a', threads=4)"
    assert repr(tvm_split.PlanRequest()) == "PlanRequest()"
    assert str(tvm_split.PlanRequest()).startswith("PlanRequest: ")
