"""Property tests draw the same examples in every process of a test run."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
PROPERTY = """
from pathlib import Path
from hypothesis import given, settings, strategies
import local_constants

@settings(max_examples=300, database=None)
@given(strategies.text() | strategies.integers())
def test_draws(value):
    with Path("draws").open("a") as file:
        print(repr(value), file=file)
"""


def test_examples_do_not_depend_on_which_modules_are_loaded(tmp_path: Path) -> None:
    draws = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "local_constants.py").write_text(f"CONSTANTS = {[f'text {index}' for index in range(100 * number)]}")
        (folder / "test_property.py").write_text(PROPERTY)
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_property.py"]
        subprocess.run(command, cwd=folder, check=True, env={"PYTHONPATH": str(CHECKOUT)}, capture_output=True)
        draws.append((folder / "draws").read_text())
    assert draws[0]
    assert draws[0] == draws[1]
