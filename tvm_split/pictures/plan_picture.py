"""Draw a plan as SVG: the graph of layers from top to bottom, coloured by machine, with selectable text."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from rich.cells import cell_len

from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.pictures.colours import COLOURS, text_colour
from tvm_split.pictures.layered_layout import Layout, layered_layout
from tvm_split.pictures.picture_graph import PictureEdge, PictureGraph, PictureNode, picture_graph
from tvm_split.planner.plan import Plan
from tvm_split.planner.shard import sharding_words
from tvm_split.units import bytes_text

MARGIN = 24.0
NODE_HEIGHT = 36.0
ROW_HEIGHT = 76.0
NODE_GAP = 18.0
LEGEND_LINE = 22.0
MARK_WIDTH = 8.0
FONT_SIZE = 13
SMALL_FONT_SIZE = 11
CHARACTER_WIDTH = 7.6
"""The font's average width in pixels, an upper estimate, since SVG cannot measure text."""
LONGEST_NAME = 34
CLIENT_COLOUR = "#ffffff"
LINE_COLOUR = "#9a9a9a"
CROSSING_COLOUR = "#111111"
NOT_IN_XML = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def draw_plan(model: Model, plan: Plan, path: str | Path) -> None:
    """Write the picture of a plan to ``path``, which ends in ``.svg``.

    A node is a layer, or several layers with their number (see `tvm_split.pictures.picture_graph`), in the colour of
    its machine. Bold lines go to another machine, with the bytes per micro-batch at a tensor's first transfer there. A
    stage of several machines has the first machine's colour and a mark for each other one. It names all machines, and
    says whether they are replicas or shards.

    Raises:
        PlanError: the path has another ending, or the plan does not fit the model.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise PlanError(f"the picture of a plan is an SVG file; {str(path)!r} does not end in .svg")
    missing = set(model.layer_names) - {layer for stage in plan.stages for layer in stage.layers}
    if missing:
        raise PlanError(f"the plan places no layer {min(missing)!r}, which model {model.name!r} has")
    tree = ElementTree(_picture(picture_graph(model, plan), plan))
    indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _picture(graph: PictureGraph, plan: Plan) -> Element:
    machines = list(dict.fromkeys(machine for stage in plan.stages for machine in stage.machines))
    colours = dict(zip(machines, itertools.cycle(COLOURS), strict=False))
    labels = [_label(graph, number) for number in range(len(graph.nodes))]
    widths = {
        str(number): _text_width(max(lines, key=cell_len)) + 20 + _marks_width(graph.nodes[number])
        for number, lines in enumerate(labels)
    }
    layout = layered_layout(
        widths,
        [(str(edge.source), str(edge.destination)) for edge in graph.edges],
        NODE_GAP,
        last=str(len(graph.nodes) - 1),
    )
    legend = _legend(graph, plan, machines)
    top = MARGIN + LEGEND_LINE * (len(legend) + 1)
    texts = [text for text, _ in legend]
    width = 2 * MARGIN + max(layout.width, *(_text_width(text) + 30 for text in texts))
    height = top + ROW_HEIGHT * (max(layout.rows.values()) + 1) + MARGIN
    left = (width - layout.width) / 2
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:.0f} {height:.0f}"})
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    root.attrib |= {"font-family": "sans-serif", "font-size": str(FONT_SIZE)}
    _add(root, "title", f"{plan.model}: {len(plan.stages)} stages")
    _add(root, "rect", width="100%", height="100%", fill="#ffffff")
    _draw_legend(root, legend, colours)
    drawing = _add(root, "g", transform=f"translate({left:.1f} {top:.1f})")
    for edge in sorted(graph.edges, key=lambda each: each.crosses):
        _draw_edge(drawing, edge, layout)
    for number, node in enumerate(graph.nodes):
        _draw_node(drawing, node, labels[number], str(number), widths[str(number)], layout, colours)
    _draw_bytes(drawing, graph.edges, layout)
    return root


def _add(parent: Element, tag: str, text: str | None = None, /, **attributes: str | float) -> Element:
    """Add an element; ``_`` in attribute names becomes ``-``, and numbers are rounded to a tenth of a pixel."""
    element = SubElement(parent, tag)
    for name, value in attributes.items():
        shown = value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
        element.set(name.replace("_", "-"), shown)
    element.text = None if text is None else NOT_IN_XML.sub("\ufffd", text)  # not allowed in XML, not even escaped
    return element


def _label(graph: PictureGraph, number: int) -> list[str]:
    node = graph.nodes[number]
    layers, machines = node.layers, node.machines
    if not layers:
        return ["inputs" if number == 0 else "outputs"]
    how = "together" if node.together else "in turns"
    several = f"{how}: {', '.join(machines)}" if len(machines) > 1 else ""
    if len(layers) == 1:
        return [_shortened(layers[0]), *filter(None, [several])]
    run = f"{len(layers)} layers to {_shortened(layers[-1])}"
    return [f"{_shortened(layers[0])} …", f"{run}; {several}" if several else run]


def _shortened(name: str) -> str:
    """Keep the end of a long name, since its beginning is often the same as its neighbours'."""
    return name if len(name) <= LONGEST_NAME else f"…{name[-LONGEST_NAME + 1 :]}"


def _legend(graph: PictureGraph, plan: Plan, machines: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return lines of text, each with the machine whose colour is shown before it, or None."""
    prediction = plan.prediction
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    title = f"{plan.model}: {stages} for {plan.objective}, {plan.origin}"
    if prediction is not None:
        title += (
            f"; predicted: {prediction.samples_per_second:.4g} micro-batches a second, "
            f"{prediction.latency_seconds * 1e3:.3g} ms for one alone"
        )
    lines: list[tuple[str, str | None]] = [(title, None)]
    predicted = {} if prediction is None else {each.machine: each for each in prediction.machines}
    for machine in machines:
        own = [stage for stage in plan.stages if machine in stage.machines]
        count = sum(len(stage.layers) for stage in own)
        text = f"{machine}: {count} layers" if count != 1 else f"{machine}: 1 layer"
        for how, shared in (("in turns", False), ("together", True)):
            teams = [stage.machines for stage in own if (stage.sharding is not None) == shared]
            others = dict.fromkeys(each for team in teams for each in team if each != machine)
            if others:
                text += f", {how} with {', '.join(others)}"
        if machine in predicted:
            times = predicted[machine]
            text += (
                f"; compute {times.compute_seconds * 1e3:.3g} ms, receive {times.receive_seconds * 1e3:.3g} ms, "
                f"send {times.send_seconds * 1e3:.3g} ms"
            )
        lines.append((text, machine))
    lines += [(f"{each.name}: {sharding_words(each)}", None) for each in plan.stages if each.sharding]
    lines.append(("bold lines go to another machine, with the bytes of each micro-batch", None))
    if graph.hidden:
        lines.append((f"not drawn: {len(graph.hidden)} layers that depend on no input", None))
    return lines


def _draw_legend(root: Element, legend: Sequence[tuple[str, str | None]], colours: dict[str, str]) -> None:
    for line, (text, machine) in enumerate(legend):
        y = MARGIN + LEGEND_LINE * line
        x = MARGIN
        if machine is not None:
            _add(root, "rect", x=x, y=y, width=16, height=16, rx=3, fill=colours[machine])
            x += 24
        _add(root, "text", text, x=x, y=y + 13, font_weight="bold" if line == 0 else "normal")


def _draw_node(
    drawing: Element,
    node: PictureNode,
    lines: Sequence[str],
    key: str,
    width: float,
    layout: Layout,
    colours: dict[str, str],
) -> None:
    x, y = layout.centres[key], layout.rows[key] * ROW_HEIGHT
    fill = colours[node.machines[0]] if node.machines else CLIENT_COLOUR
    group = _add(drawing, "g")
    placed = f"{', '.join(node.machines)}, stage {node.stage}: {', '.join(node.layers)}"
    _add(group, "title", placed if node.machines else "the client")
    box = {"x": x - width / 2, "y": y, "width": width, "height": NODE_HEIGHT}
    _add(group, "rect", rx=6, fill=fill, stroke="#333333", **box)
    for number, machine in enumerate(node.machines[:0:-1], start=1):
        left = x + width / 2 - 4 - MARK_WIDTH * number
        mark = {"width": MARK_WIDTH, "height": NODE_HEIGHT - 12}
        _add(group, "rect", x=left, y=y + 6, fill=colours[machine], stroke="#333333", stroke_width=0.5, **mark)
    x -= _marks_width(node) / 2
    first = y + (NODE_HEIGHT / 2 + 5 if len(lines) == 1 else 15)
    for number, text in enumerate(lines):
        size = FONT_SIZE if number == 0 else SMALL_FONT_SIZE
        place = {"x": x, "y": first + 15 * number}
        _add(group, "text", text, text_anchor="middle", font_size=size, fill=text_colour(fill), **place)


def _draw_edge(drawing: Element, edge: PictureEdge, layout: Layout) -> None:
    points = _points(edge, layout)
    path = f"M {points[0][0]:.1f} {points[0][1]:.1f}"
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        middle = (y + next_y) / 2
        path += f" C {x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
    colour, width = (CROSSING_COLOUR, 2.5) if edge.crosses else (LINE_COLOUR, 1.2)
    _add(drawing, "path", d=path, fill="none", stroke=colour, stroke_width=width)


def _draw_bytes(drawing: Element, edges: Sequence[PictureEdge], layout: Layout) -> None:
    """Draw the bytes with a white outline beside each line: at its end, or at its start if several lines end there."""
    labelled = [edge for edge in edges if edge.crosses and edge.bytes]
    ends = Counter(edge.destination for edge in labelled)
    starts = Counter(edge.source for edge in labelled)
    stacked: Counter[int] = Counter()
    for edge in labelled:
        points = _points(edge, layout)
        if ends[edge.destination] > 1 and starts[edge.source] == 1:
            x, y = points[0][0] + 5, points[0][1] + FONT_SIZE
        else:
            x, y = points[-1][0] + 5, points[-1][1] - 6 - SMALL_FONT_SIZE * stacked[edge.destination]
            stacked[edge.destination] += 1
        halo: dict[str, str | float] = {"stroke": "#ffffff", "stroke_width": 3, "paint_order": "stroke"}
        _add(drawing, "text", bytes_text(edge.bytes), x=x, y=y, font_size=SMALL_FONT_SIZE, **halo)


def _points(edge: PictureEdge, layout: Layout) -> list[tuple[float, float]]:
    source, destination = str(edge.source), str(edge.destination)
    joints = [
        point
        for row, x in layout.joints[source, destination]
        for point in ((x, row * ROW_HEIGHT), (x, row * ROW_HEIGHT + NODE_HEIGHT))
    ]
    start = (layout.centres[source], layout.rows[source] * ROW_HEIGHT + NODE_HEIGHT)
    return [start, *joints, (layout.centres[destination], layout.rows[destination] * ROW_HEIGHT)]


def _marks_width(node: PictureNode) -> float:
    """Return the width of the marks for the second and later machines, at the right of a node."""
    return MARK_WIDTH * max(0, len(node.machines) - 1)


def _text_width(text: str) -> float:
    return cell_len(text) * CHARACTER_WIDTH
