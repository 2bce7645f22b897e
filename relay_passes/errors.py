"""Errors of the passes.

The room may not know the others, so these have bases of their own; the front door turns `SelfWaitError` into an error
in the user's words, and a `ContractError` is a message to the author of a pass. They are registered, so that they keep
their class when they pass through TVM's pass manager; for the same reason a message is all they carry.
"""

from __future__ import annotations

from tvm_ffi import register_error


@register_error
class ContractError(Exception):
    """A module does not have the form that a pass requires, or a pass did not ensure what it promises."""


@register_error
class SelfWaitError(ValueError):
    """A stage would have to wait for its own result."""
