"""The search, the division of trials and the verdict: pure, so that claims about them are tried on many spaces."""

import pytest
from hypothesis import given, settings, strategies as st

from schedules.template import Space, text_of
from schedules.tuning.decisions import divide_trials, judge, propose


def some_space(sizes, forbidden):
    axes = {f"axis_{position}": tuple(range(size)) for position, size in enumerate(sizes)}
    default = dict.fromkeys(axes, 0)
    return Space(axes, default, lambda choices: sum(choices.values()) % 7 != forbidden or choices == default)


spaces = st.builds(some_space, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 6))


def seconds_of(choices):
    """Some measured time; every fifth fails."""
    value = sum((number + 2) * choice for number, choice in enumerate(choices.values()))
    return None if value % 5 == 4 else 1.0 + (value % 11)


@settings(max_examples=60)
@given(space=spaces, size=st.integers(1, 9), seed=st.integers(0, 3))
def test_until_exhausted_everything_once_the_default_first(space, size, seed):
    history = {}
    first = None
    while batch := propose(space, history, size, seed):
        first = first or batch[0]
        texts = [text_of(choices) for choices in batch]
        assert len(set(texts)) == len(texts) <= size
        assert not set(texts) & set(history)
        assert all(space.contains(choices) for choices in batch)
        history.update({text_of(choices): seconds_of(choices) for choices in batch})
    assert first == space.default
    assert set(history) == {text_of(choices) for choices in space.all_choices()}


@settings(max_examples=30)
@given(space=spaces, seed=st.integers(0, 3))
def test_the_same_history_and_seed_give_the_same_proposals(space, seed):
    history = {text_of(choices): seconds_of(choices) for choices in propose(space, {}, 6, seed)}
    assert propose(space, history, 6, seed) == propose(space, dict(reversed(history.items())), 6, seed)


def test_half_of_a_batch_changes_one_choice_of_the_best():
    space = Space({"a": tuple(range(40)), "b": tuple(range(40))}, {"a": 0, "b": 0})
    history = {text_of({"a": 20, "b": 20}): 1.0, text_of({"a": 3, "b": 3}): 9.0, text_of(space.default): 9.5}
    batch = propose(space, history, 8)
    changes = [(choices["a"] != 20) + (choices["b"] != 20) for choices in batch]
    assert changes.count(1) >= 4
    nearest = [abs(choices["a"] - 20) + abs(choices["b"] - 20) for choices in batch[:4]]
    assert nearest == [1, 1, 1, 1]


def test_measured_choices_that_left_the_space_are_no_starting_point():
    space = Space({"a": (1, 2)}, {"a": 1})
    assert propose(space, {"a=9": 0.1, "b=1": 0.1, "a=1": 1.0}, 5) == [{"a": 2}]


@settings(max_examples=100)
@given(
    kernels=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=8),
    trials=st.integers(0, 300),
)
def test_trials_are_divided_without_rest(kernels, trials):
    weights, limits = [weight for weight, _ in kernels], [limit for _, limit in kernels]
    shares = divide_trials(weights, trials, limits)
    assert all(1 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    usable = sum(limit if weight > 0 else 1 for weight, limit in kernels)
    assert sum(shares) == max(len(kernels), min(trials, usable))


def test_more_time_gets_more_trials():
    assert divide_trials([6.0, 3.0, 1.0], 103, [1000, 1000, 1000]) == [61, 31, 11]
    assert divide_trials([6.0, 3.0, 1.0], 100, [10, 1000, 1000]) == [10, 68, 22]


def test_faster_by_more_than_the_noise():
    verdict = judge([1.0, 1.1, 0.9, 1.0, 1.0], [0.8, 0.88, 0.72, 0.8, 0.8])
    assert verdict.is_faster
    assert verdict.ratio == pytest.approx(0.8)
    assert (verdict.default_seconds, verdict.tuned_seconds) == (1.0, 0.8)


def test_a_slow_while_slows_both_and_changes_nothing():
    assert judge([1.0, 5.0, 5.0], [0.8, 4.0, 4.0]).ratio == pytest.approx(0.8)


@pytest.mark.parametrize(
    "tuned",
    [
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.995, 0.995, 0.995, 0.995, 0.995],  # less than a percent
        [0.7, 1.3, 0.9, 1.2, 0.95],  # anything might be true
        [1.2, 1.2, 1.2, 1.2, 1.2],
    ],
)
def test_not_surely_faster(tuned):
    assert not judge([1.0] * 5, tuned).is_faster


def test_unequal_rounds():
    with pytest.raises(ValueError, match="they have 1 and 2"):
        judge([1.0], [1.0, 2.0])
