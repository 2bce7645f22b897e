"""Compare installed versions of frameworks with the tested ranges in this project's package metadata."""

from __future__ import annotations

import warnings
from importlib import metadata

from packaging.requirements import Requirement

from tvm_split.errors import UntriedVersionWarning

DISTRIBUTION = "tvm-split"


def warn_if_untested(package: str, version: str, extra: str) -> None:
    """Warn if ``version`` of ``package`` is outside the range that the extra ``extra`` requires."""
    try:
        texts = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # imported from a checkout that is not installed
        return
    for requirement in map(Requirement, texts):
        marker, tested = requirement.marker, requirement.specifier
        is_of_extra = requirement.name == package and marker is not None and marker.evaluate({"extra": extra})
        if is_of_extra and not tested.contains(version, prereleases=True):
            text = (
                f"{package} {version} is installed, and tvm-split is tested with {package}{tested}. "
                f"If an import or its answers are wrong: pip install '{package}{tested}'"
            )
            warnings.warn(UntriedVersionWarning(text), stacklevel=2)
