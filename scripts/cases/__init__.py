"""The benchmarks by name. A case's module defines ``CASE``, and is imported when the case is requested."""

from importlib import import_module

from scripts.harness import Case

CASES = (
    "kernels",
    "sources",
    "first",
    "streams",
    "shards",
    "links",
    "plans",
    "planner",
    "unequal",
    "shaped",
    "simulation",
    "gpu",
    "observing",
    "overhead",
)


def case_named(name: str) -> Case:
    case: Case = import_module(f"scripts.cases.{name}").CASE
    return case
