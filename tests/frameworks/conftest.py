"""What all tests of other frameworks share."""

import sys

import pytest


@pytest.fixture(autouse=True)
def same_weights_in_each_run() -> None:
    """Keras draws the weights of new layers; by chance a small network answers with zeros alone."""
    if keras := sys.modules.get("keras"):
        keras.utils.set_random_seed(0)
