"""In which line of a YAML file something stands; JSON is YAML."""

from __future__ import annotations

import yaml


def line_of(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """The line (from 1) of the deepest node on the way to a location."""
    line = 1
    for step in location:
        if node is None:
            break
        if isinstance(node, yaml.MappingNode):
            entries = {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
            if step not in entries:
                break
            key, node = entries[step]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line
