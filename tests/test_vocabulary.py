"""Names in the code are the field's words, for a few for which this project once had words of its own."""

import ast
import re
from pathlib import Path

import pytest

INSTEAD = {
    "crossing": "transfer",
    "keeper": "holder",
    "maker": "producer",
    "patience": "timeout, deadline",
    "summand": "partial sum",
    "taker": "consumer, reader",
    "turns": "schedule",
}
ROOTS = ("tvm_split", "rpc_runtime", "relay_passes", "schedules")


def names_in(text: str) -> set[str]:
    """All names that are defined in a file: of classes, functions, parameters, variables and attributes."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


@pytest.mark.parametrize("root", ROOTS)
def test_no_private_words(root: str) -> None:
    wrong = [
        f"{path.name}: {name} ({INSTEAD[word]})"
        for path in sorted((Path(__file__).parents[1] / root).rglob("*.py"))
        for name in names_in(path.read_text())
        for part in re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
        if (word := next((word for word in INSTEAD if part in (word, f"{word}s")), None))
    ]
    assert wrong == []
