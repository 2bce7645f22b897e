"""The view of values that have no other: the fields that differ from their defaults."""

from tvm_split.display.view import Table, View, view
from tvm_split.units import ShownFields


@view.register
def view_of_fields(value: ShownFields, *, details: bool = False) -> View:
    """Return a table of the fields that differ from their defaults."""
    if not value.given:
        return [f"{type(value).__name__}: all fields have their defaults"]
    return [Table(type(value).__name__, ("field", "value"), (), [(n, str(v)) for n, v in value.given.items()])]
