"""Quantities as people read them."""

import pytest

from tvm_split.units import age_text, bytes_text, count_text, number_text, precise_bytes_text, seconds_text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_560_000, "2.6 MB"), (4e9, "4.0 GB")]
)
def test_bytes(count, text):
    assert bytes_text(count) == text


def test_bytes_that_differ_are_seen_to():
    assert (precise_bytes_text(1_234_400), precise_bytes_text(1_234_600)) == ("1.234 MB", "1.235 MB")
    assert precise_bytes_text(12) == "12 B"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 µs"), (7e-9, "7 ns"), (12345, "12300 s")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "less than a minute"), (60, "1 minute"), (7199, "1 hour"), (7200, "2 hours"), (86400 * 3.9, "3 days")],
)
def test_ages(seconds, text):
    assert age_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(1250.4, "1250"), (83.333, "83.33"), (2.5e-5, "0.000025"), (1e9, "1000000000"), (0, "0")]
)
def test_numbers_have_no_exponent(number, text):
    assert number_text(number) == text


def test_a_count_of_one_is_singular():
    assert [count_text(count, "stage") for count in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert count_text(2, "micro-batch") == "2 micro-batches"
