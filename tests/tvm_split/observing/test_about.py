"""What a client says about its deployment, and what becomes of it where a bystander reads it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.errors import ProtocolError
from tvm_split.observing.about import About, AboutLink, AboutStage, about_in, text_of

LIMIT = 64 * 1024
NAMES = st.text(st.characters(categories=("L", "N", "P")), max_size=20)
SECONDS = st.floats(0, 1e6)
STAGES = st.builds(AboutStage, NAMES, NAMES, st.lists(NAMES, max_size=3).map(tuple))
LINKS = st.builds(AboutLink, NAMES, NAMES, SECONDS)
ABOUTS = st.builds(
    About,
    st.lists(STAGES, max_size=3).map(tuple),
    st.none() | SECONDS,
    st.none() | SECONDS,
    st.dictionaries(NAMES, SECONDS, max_size=2),
    st.lists(LINKS, max_size=2).map(tuple),
)


@given(ABOUTS)
def test_a_bystander_reads_what_was_said(about: About) -> None:
    assert about_in([b"", text_of(about)]) == about
    assert about_in([b'{"stages": 5}', text_of(about)]) == about, "one worker lies"


def test_names_of_layers_and_then_stages_are_left_out_if_they_are_too_many() -> None:
    layers = tuple(f"features.{number}.conv" for number in range(10_000))
    about = About((AboutStage("one", "machine-a", layers),), 0.5)
    assert len(text_of(about)) <= LIMIT
    assert about_in([text_of(about)]) == replace(about, stages=(AboutStage("one", "machine-a"),))
    about = About((AboutStage("one", "machine-a"),) * 10_000, 0.5)
    assert about_in([text_of(about)]) == About(period_seconds=0.5)
    assert text_of(About(links=(AboutLink("machine-a", "machine-b", 0.5),) * 10_000)) == b""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"\xff", "decode"),
        (b"[]", "must be a dictionary"),
        (b"[" * LIMIT, "recursion"),
        (b'{"stages": [{"name": 5, "machine": "a"}]}', "stages.0.name: must be text"),
        (b'{"stages": [{"name": "one"}]}', "stages.0.machine: this key is missing"),
        (b'{"period_seconds": -1}', "period_seconds: must be"),
        (b'{"period_seconds": NaN}', "must be a finite number"),
    ],
)
def test_a_lying_worker(text: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        about_in([text])


def test_names_are_safe_in_a_terminal() -> None:
    hostile = {"stages": [{"name": "\x1b[2J", "machine": "a\nerror: gone", "layers": ["\u202e" * 5000]}]}
    (stage,) = about_in([json.dumps(hostile).encode()]).stages
    assert (stage.name, stage.machine) == ("\\x1b[2J", "a\\nerror: gone")
    assert stage.layers[0].isprintable()
