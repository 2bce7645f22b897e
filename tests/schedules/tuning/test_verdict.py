import pytest

from schedules.tuning.decisions import judge


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
    with pytest.raises(ValueError, match="got 1 and 2"):
        judge([1.0], [1.0, 2.0])
