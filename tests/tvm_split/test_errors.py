import pytest

from schedules import blocks
from tvm_split.errors import last_line


@pytest.mark.parametrize("of", [last_line, blocks.last_line])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trace\nall loops must be bound", "all loops must be bound"),
        ("the loops must be the deepest:\n  T.reads(x[0])\n  ^^^^^^^^^^^^^\n\n", "  T.reads(x[0])"),
        ("", "ValueError"),
        ("^^^^", "ValueError"),
    ],
)
def test_the_last_line_of_an_error_says_something(of, text, line):
    assert of(ValueError(text)) == line
