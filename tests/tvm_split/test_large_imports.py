from __future__ import annotations

import gc

from tvm_split.large_imports import without_collections, without_old_objects


def test_old_objects_are_left_alone_and_looked_at_again_afterwards() -> None:
    gc.unfreeze()
    with without_old_objects():
        first = gc.get_freeze_count()
        assert first > 0
        with without_old_objects(), without_collections():
            assert not gc.isenabled()
            loaded = [[number] for number in range(1000)]
        assert gc.get_freeze_count() >= first + len(loaded)
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_somebody_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with without_old_objects(), without_collections():
            loaded = [[number] for number in range(1000)]
        assert 0 < gc.get_freeze_count() < before + len(loaded)
    finally:
        gc.unfreeze()
