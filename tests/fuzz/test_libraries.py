"""Whatever a library is damaged by, its worker lives, and an honest deployment beside keeps giving right results."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rpc_runtime.client.pipeline import Pipeline
from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from tests.helpers.rpc_runtime.pipelines import same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, one_stage
from tests.helpers.trials import Memory, Standing, Trials


def truncated(library: bytes, source: random.Random) -> bytes:
    return library[: source.randrange(1, len(library))]


def flipped(library: bytes, source: random.Random) -> bytes:
    return _flipped(library, source, len(library), 9)


def flipped_head(library: bytes, source: random.Random) -> bytes:
    return _flipped(library, source, 1024, 5)


def _flipped(library: bytes, source: random.Random, size: int, most: int) -> bytes:
    data = bytearray(library)
    for _ in range(1 << source.randrange(most)):
        data[source.randrange(size)] ^= source.randrange(1, 256)
    return bytes(data)


def zeroed(library: bytes, source: random.Random) -> bytes:
    start, length = source.randrange(64, len(library)), source.randrange(1, 4096)
    return library[:start] + bytes(len(library[start : start + length])) + library[start + length :]


def garbage_behind_the_head(library: bytes, source: random.Random) -> bytes:
    return library[: source.randrange(64, 1024)] + source.randbytes(len(library))


DAMAGES = (truncated, flipped, zeroed, garbage_behind_the_head, flipped_head)


def test_damaged_libraries(standing: Standing, trials: Trials, maker: ProgramMaker) -> None:
    program, memory = one_stage(maker), Memory(standing.process)
    batch = batches_for(program, 1)[0]
    library = maker.blob_path(program.stages[0].library.sha256).read_bytes()
    honest_batch = batches_for(standing.honest.program, 1)[0]
    expected = standing.honest.run(honest_batch)
    for number in trials:
        content = DAMAGES[number % len(DAMAGES)](library, trials.source)
        stage = replace(program.stages[0], library=maker.blob(content))
        wrong = replace(program, stages=(stage,))
        try:
            with Pipeline.open(wrong, {A: standing.endpoint}, maker.blob_path) as pipeline:
                pipeline.run(batch)
            trials.found["ran"] += 1
        except WorkerUnavailableError as error:
            pytest.fail(f"{DAMAGES[number % len(DAMAGES)].__name__}, trial {number}, ended the worker: {error}")
        except WorkerError:
            trials.found["refused"] += 1
        assert same(standing.honest.run(honest_batch), expected)
        memory.check()
    assert trials.found["refused"] > trials.found["ran"]
