"""The benchmarks by name, which are this folder's modules; each says what it measures, and defines ``CASE``."""

from importlib import import_module
from pathlib import Path

from scripts.harness import Case

CASES = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def case_named(name: str) -> Case:
    case: Case = import_module(f"scripts.cases.{name}").CASE
    return case
