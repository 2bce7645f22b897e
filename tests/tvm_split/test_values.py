"""Values in files: an error names the line, and default values are not written."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import ConfigDict, Field

from tests.helpers.mutations import WRONG_FILES
from tvm_split.errors import PlanError
from tvm_split.values import Document, content_of, read, write


@dataclass(frozen=True)
class Wheel:
    spokes: Annotated[int, Field(ge=3)]
    color: str = "black"
    load: float = 0.0


@dataclass(frozen=True)
class Bicycle:
    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    wheels: tuple[Wheel, ...] = ()

    def __post_init__(self) -> None:
        if len(self.wheels) == 1:
            raise ValueError("one wheel is none")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, value = tmp_path / "file.json", Bicycle("red", (Wheel(12), Wheel(24, "grey")))
    assert content_of(value) == {"name": "red", "wheels": [{"spokes": 12}, {"spokes": 24, "color": "grey"}]}
    write(content_of(value), path)
    assert read(Bicycle, path, PlanError) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a",\n "wheels": [{"spokes": 9},\n {"spokes": 1}]}', r":3: wheels.1.spokes: .*\(it is 1\)"),
        ('{"name": "a",\n "bell": 1}', ":2: bell: there is no such key"),
        ('{"name": "a", "wheels": [{"spokes": 9}]}', ":1: file: one wheel is none"),
        ('{"name": "a",\n "name": "b"}', "the key 'name' is there twice"),
        ('{"name": "a",\n\t"wheels": [{"spokes": 1}]}', ":2: wheels"),
        ('{"name": "a",\n,}', ":2: this is not valid JSON"),
        ('{"name": "a", "wheels":\n [{"spokes": 9, "load": Infinity}]}', ":2: wheels.0.load: .*finite number"),
        ('{"name": "a", "wheels": [{"spokes": 9,\n "load": 1e999}]}', ":2: wheels.0.load: .*finite number"),
        ('{"name": NaN}', ":1: name: .*finite number"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=f"file.json.*{message}"):
        read(Bicycle, path, PlanError)


def test_what_comes_from_no_file_has_no_lines() -> None:
    with pytest.raises(PlanError, match="manifest: name: this key is missing"):
        Document("manifest", {}, PlanError).value(Bicycle)


@pytest.mark.parametrize("content", WRONG_FILES, ids=lambda content: repr(content[:6]))
def test_what_is_no_file_of_values_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"file\.json") as refusal:
        read(Bicycle, path, PlanError)
    assert "codec" not in str(refusal.value)


def test_nobody_waits_for_a_pipe_or_reads_a_device_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(PlanError, match=rf"cannot read {path}: it is a pipe, socket or device, not a file"):
            read(Bicycle, path, PlanError)
    with pytest.raises(PlanError, match=f"cannot read {tmp_path}: Is a directory"):
        read(Bicycle, tmp_path, PlanError)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read .*missing\.json: No such file"):
        read(Bicycle, tmp_path / "missing.json", PlanError)
