"""The database folder: what goes in comes out, for the same kernel and target only."""

import contextlib
import fcntl
import logging
import os

import pytest
import tvm
import tvm_ffi

import schedules
from schedules.template import CHOICES_ATTRIBUTE, text_of
from schedules.tuning.database import RECORDS, DatabaseWriter, TuningDatabase
from schedules.tuning.errors import DatabaseError
from tests.helpers.schedules.schedule_harness import HOST, graph_of, lower, run
from tests.helpers.schedules.template_cases import CASES, TRAITS, template_and_function
from tvm_split.compiler.targets import host_target

OTHER_THREADS = tvm.target.Target(host_target(7))


def written(folder, seconds=0.5, name="conv2d", target=HOST, which=3):
    """A folder in which other choices than the default's were decided; returns the kernel and these choices."""
    template, function = template_and_function(name)
    space = template.space(function, TRAITS)
    others = [text_of(candidate) for candidate in space.all_choices() if candidate != space.default]
    choices, failing = others[which], others[0]
    with DatabaseWriter(folder) as writer:
        for tried, measured in ((text_of(space.default), 1.0), (choices, seconds)):
            writer.add_trial(function, target, tried, [measured, measured * 1.1, measured * 0.9])
            writer.add_decision(function, target, tried, measured)
        writer.add_trial(function, target, failing, (), "too slow")
    return function, choices, failing


def test_what_was_decided_is_scheduled(tmp_path):
    function, choices, _ = written(tmp_path)
    database = TuningDatabase(tmp_path)
    assert database.decision(function, HOST).choices == choices
    assert database.kernel(function, HOST).attrs[CHOICES_ATTRIBUTE] == choices
    assert database.decision(function, OTHER_THREADS) is None
    assert database.kernel(template_and_function("matmul")[1], HOST) is None


def test_apply_takes_tuned_kernels_and_says_so(tmp_path):
    graph, data = CASES["conv2d"]
    module = graph_of(graph, [data])
    _, choices, _ = written(tmp_path)
    before = lower(module, HOST)
    after = lower(module, HOST, TuningDatabase(tmp_path))
    assert "conv2d (tuned)" in set(schedules.chosen_rules(after).values())
    name = next(name for name, rule in schedules.chosen_rules(after).items() if rule == "conv2d (tuned)")
    assert after[name].attrs[CHOICES_ATTRIBUTE] == choices != before[name].attrs[CHOICES_ATTRIBUTE]
    assert abs(run(after, [data]) - run(before, [data])).max() < 1e-3


def test_a_decision_for_the_default_changes_nothing(tmp_path):
    graph, data = CASES["conv2d"]
    module = graph_of(graph, [data])
    written(tmp_path, seconds=2.0)
    assert tvm_ffi.structural_equal(lower(module, HOST, TuningDatabase(tmp_path)), lower(module, HOST))


def test_history_has_medians_and_failures(tmp_path):
    function, choices, failing = written(tmp_path)
    with DatabaseWriter(tmp_path) as writer:
        history = writer.history(function, HOST)
        assert history[choices].seconds == pytest.approx(0.5)
        assert len(history[choices].rounds) == 3
        assert history[failing].error == "too slow"
        assert history[failing].seconds is None
        assert writer.history(function, OTHER_THREADS) == {}


def test_merging(tmp_path):
    target_folder, source_folder = tmp_path / "mine", tmp_path / "theirs"
    function, _, _ = written(target_folder)
    product, product_choices, _ = written(source_folder, name="matmul", which=1)
    _, faster, _ = written(source_folder, seconds=0.25, which=5)
    with DatabaseWriter(target_folder) as writer:
        copied = writer.merge(source_folder)
        assert copied == 10 - 3, "the default is decided and measured, and the failure, in both"
        assert writer.merge(source_folder) == 0
        assert len(writer.history(product, HOST)) == 3
    database = TuningDatabase(target_folder)
    assert database.decision(product, HOST).choices == product_choices
    assert database.decision(function, HOST).choices == faster


def test_merging_what_is_no_database(tmp_path):
    with DatabaseWriter(tmp_path / "mine") as writer, pytest.raises(DatabaseError, match="not a tuning database"):
        writer.merge(tmp_path / "nothing")


@pytest.mark.parametrize("damage", ["[0, [[[[\n", "[" * 100_000 + "\n", "{}\n", '{"kernel": 7}\n', "\xff\n"], ids=repr)
def test_a_damaged_line_is_named(tmp_path, damage):
    written(tmp_path)
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes() + damage.encode("latin-1"))
    with pytest.raises(DatabaseError, match=rf"{RECORDS}:6 is damaged"):
        TuningDatabase(tmp_path)


def test_a_writer_that_was_killed_leaves_a_half_line_and_no_damage(tmp_path, caplog):
    function, choices, _ = written(tmp_path)
    path = tmp_path / RECORDS
    path.write_text(path.read_text() + '{"kernel": "01')
    assert TuningDatabase(tmp_path).decision(function, HOST).choices == choices
    with caplog.at_level(logging.WARNING), DatabaseWriter(tmp_path) as writer:
        assert choices in writer.history(function, HOST)
    assert "unfinished line" in caplog.text
    assert path.read_text().endswith("}\n")


def test_choices_that_are_no_longer_offered_are_logged_and_left_out(tmp_path, caplog):
    _, function = template_and_function("conv2d")
    with DatabaseWriter(tmp_path) as writer:
        writer.add_decision(function, HOST, "tile=99x9", 1e-9)
    with caplog.at_level(logging.WARNING):
        assert TuningDatabase(tmp_path).kernel(function, HOST) is None
    assert "keeps the default" in caplog.text


def test_one_writer_at_a_time(tmp_path):
    with DatabaseWriter(tmp_path), pytest.raises(DatabaseError, match="another process writes"):
        DatabaseWriter(tmp_path)


def test_another_user_who_can_read_the_folder_keeps_no_writer_away(tmp_path):
    with DatabaseWriter(tmp_path):
        pass
    with contextlib.ExitStack() as until_end:
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.stat().st_mode & 0o004:
                fcntl.flock(until_end.enter_context(path.open("rb")), fcntl.LOCK_EX)
        with DatabaseWriter(tmp_path):
            pass


def test_a_folder_that_does_not_exist_is_empty(tmp_path):
    assert len(TuningDatabase(tmp_path / "none")) == 0


@pytest.mark.parametrize("use", [TuningDatabase, DatabaseWriter])
def test_nobody_waits_for_a_pipe(tmp_path, use):
    os.mkfifo(tmp_path / RECORDS)
    with pytest.raises(DatabaseError, match=rf"cannot read {tmp_path / RECORDS}: it is a pipe, socket or device"):
        use(tmp_path)


@pytest.mark.parametrize("use", [TuningDatabase, DatabaseWriter])
@pytest.mark.parametrize("place", [RECORDS, ""])
def test_what_is_no_file_of_records_is_named(tmp_path, use, place):
    """A folder in place of the file, and a file in place of the folder."""
    folder = tmp_path / "tuned"
    if place:
        (folder / place).mkdir(parents=True)
    else:
        folder.write_text("")
    with pytest.raises(DatabaseError, match=rf"cannot (read|write).* {folder}.*: (Is|Not) a directory|File exists"):
        use(folder)
