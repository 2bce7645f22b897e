"""Draw a plan as SVG: a lane for each machine, layers from top to bottom, with selectable text.

A layer's row is the length of the longest path to it, so every edge goes down. Within its lane, a layer takes the
column of the layer whose result it uses, if that is free in its row.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from rich.cells import cell_len

from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.outputs import written
from tvm_split.pictures.timeline import COLOURS, NOT_IN_XML, TEXT_COLOURS
from tvm_split.placement.by_hand import sharding_words
from tvm_split.placement.graph import LayerGraph
from tvm_split.placement.plan import Plan
from tvm_split.units import bytes_text, count_text, number_text, seconds_text

MOST_NODES = 60
"""About the most nodes of a picture; more layers are drawn in runs of consecutive layers."""
MARGIN = 24.0
NODE_HEIGHT = 36.0
ROW_HEIGHT = 76.0
COLUMN_GAP = 48.0
"""The space between columns, in which edges pass nodes."""
LEGEND_LINE = 22.0
FONT_SIZE = 13
SMALL_FONT_SIZE = 11
CHARACTER_WIDTH = 7.6
"""The font's average width in pixels, an upper estimate, since SVG cannot measure text."""
LONGEST_NAME = 34
LINE_COLOUR = "#9a9a9a"
TRANSFER_COLOUR = "#111111"


def draw_plan(model: Model, plan: Plan, path: str | Path) -> None:
    """Write the picture of a plan to ``path``, which ends in ``.svg``.

    A node is a layer, or several layers with their number (see `picture_graph`), in the lane and
    the colour of its machine. Bold lines go to another machine, with the bytes per micro-batch at a tensor's first
    transfer there. A stage of several machines is in the first machine's lane. It names all machines, and says
    whether they are replicas or shards.

    Raises:
        PlanError: the path has another ending, or the plan does not fit the model.
        OutputError: it cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise PlanError(f"the picture of a plan is an SVG file; {str(path)!r} does not end in .svg")
    missing = set(model.layer_names) - {layer for stage in plan.stages for layer in stage.layers}
    if missing:
        raise PlanError(f"the plan places no layer {min(missing)!r}, which model {model.name!r} has")
    tree = ElementTree(_picture(picture_graph(model, plan), plan))
    indent(tree)
    with written(path) as beside:
        tree.write(beside, encoding="utf-8", xml_declaration=True)


@dataclass(frozen=True)
class PictureNode:
    """Layers that are drawn as one node.

    ``machines`` are usually one; several are replicas, or compute shards if ``sharded``. The client's inputs and
    outputs have no machines, and their ``stage`` is None.
    """

    layers: tuple[str, ...]
    machines: tuple[str, ...]
    stage: int | None
    sharded: bool = False

    @property
    def placement(self) -> tuple[tuple[str, ...], int | None]:
        """The machines of the node, with the stage if it is sharded; values between different placements are
        transferred."""
        return self.machines, self.stage if self.sharded else None


@dataclass(frozen=True)
class PictureEdge:
    """An edge between nodes, by their numbers; ``bytes`` are those that it transfers to another machine.

    A value counts only on the first edge to each machine, and there with its whole size, also if a sharded stage sends
    or receives parts of it.
    """

    source: int
    destination: int
    crosses: bool
    bytes: int


@dataclass(frozen=True)
class PictureGraph:
    """Nodes in topological order, inputs first, outputs last; ``hidden`` layers need no input and are not drawn."""

    nodes: tuple[PictureNode, ...]
    edges: tuple[PictureEdge, ...]
    hidden: tuple[str, ...]


def picture_graph(model: Model, plan: Plan) -> PictureGraph:
    """Return the graph to draw for a plan, which must fit the model.

    Layers that need each other's results are one node. If there are more than `MOST_NODES`, consecutive ones of a stage
    are merged.
    """
    graph = model.graph
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    size = -(-len(graph.units) // MOST_NODES)
    nodes = [PictureNode((), (), None)]
    for number, units in itertools.groupby(graph.units, key=lambda unit: stage_of[unit[0]]):
        stage, same_stage = plan.stages[number], list(units)
        for start in range(0, len(same_stage), size):
            layers = tuple(itertools.chain(*same_stage[start : start + size]))
            nodes.append(PictureNode(layers, stage.machines, number, stage.sharding is not None))
    nodes.append(PictureNode((), (), None))
    hidden = tuple(layer for layer in graph.layers if layer in graph.independent)
    return PictureGraph(tuple(nodes), _edges(graph, nodes), hidden)


def _edges(graph: LayerGraph, nodes: Sequence[PictureNode]) -> tuple[PictureEdge, ...]:
    number_of = {layer: number for number, node in enumerate(nodes) for layer in node.layers}
    placements = [node.placement for node in nodes]
    sizes: dict[tuple[int, int], int] = {}
    for value in (*graph.inputs, *graph.values):
        source = number_of.get(value.producer, 0)
        ends = {number_of[layer] for layer in value.consumers if layer in number_of}
        ends |= {len(nodes) - 1} if value.is_output else set()
        seen = {placements[source]}
        for end in sorted(ends - {source}):
            sizes[source, end] = sizes.get((source, end), 0) + (0 if placements[end] in seen else value.size_bytes)
            seen.add(placements[end])
    return tuple(
        PictureEdge(source, end, placements[source] != placements[end], size) for (source, end), size in sizes.items()
    )


@dataclass(frozen=True)
class _Box:
    """Where a node is drawn: its row and column, and its rectangle; ``x`` is its horizontal centre, ``y`` its top."""

    row: int
    column: int
    x: float
    y: float
    width: float


def _picture(graph: PictureGraph, plan: Plan) -> Element:
    machines = list(dict.fromkeys(machine for stage in plan.stages for machine in stage.machines))
    colours = {machine: number % len(COLOURS) for number, machine in enumerate(machines)}
    labels = [_label(graph, number) for number in range(len(graph.nodes))]
    boxes, lanes_width = _boxes(graph, labels, machines)
    legend = _legend(graph, plan, machines)
    top = MARGIN + LEGEND_LINE * (len(legend) + 1)
    width = 2 * MARGIN + max(lanes_width, *(_text_width(text) + 30 for text, _ in legend))
    height = top + ROW_HEIGHT * (boxes[-1].row + 1) + MARGIN
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:.0f} {height:.0f}"})
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    root.attrib |= {"font-family": "sans-serif", "font-size": str(FONT_SIZE)}
    _add(root, "title", f"{plan.model}: {count_text(len(plan.stages), 'stage')}")
    _add(root, "rect", width="100%", height="100%", fill="#ffffff")
    _draw_legend(root, legend, colours)
    drawing = _add(root, "g", transform=f"translate({(width - lanes_width) / 2:.1f} {top:.1f})")
    occupied = {(box.row, box.column) for box in boxes}
    for edge in sorted(graph.edges, key=lambda edge: edge.crosses):
        _draw_edge(drawing, edge, boxes, occupied)
    for node, lines, box in zip(graph.nodes, labels, boxes, strict=True):
        _draw_node(drawing, node, lines, box, colours)
    _draw_bytes(drawing, graph.edges, boxes)
    return root


def _boxes(graph: PictureGraph, labels: Sequence[Sequence[str]], machines: Sequence[str]) -> tuple[list[_Box], float]:
    """Place nodes in rows and in the columns of their machines' lanes; return the boxes and the whole width."""
    producers: list[list[int]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        producers[edge.destination].append(edge.source)
    lanes = [machines.index(node.machines[0]) if node.machines else 0 for node in graph.nodes]
    rows: list[int] = []
    places: list[tuple[int, int]] = []  # lane, column in the lane
    for number, lane in enumerate(lanes):
        last = number == len(lanes) - 1
        rows.append(max((rows[source] + 1 for source in (range(number) if last else producers[number])), default=0))
        preferred = [places[source][1] for source in producers[number] if lanes[source] == lane]
        occupied = {place for place, row in zip(places, rows, strict=False) if row == rows[number]}
        free = (column for column in (*preferred, *range(len(lanes))) if (lane, column) not in occupied)
        places.append((lane, next(free)))
    widths = [_text_width(max(lines, key=cell_len)) + 20 for lines in labels]
    columns = sorted(set(places))
    column_widths = [
        max(width for width, place in zip(widths, places, strict=True) if place == column) for column in columns
    ]
    boxes = []
    for row, place, width in zip(rows, places, widths, strict=True):
        column = columns.index(place)
        x = sum(column_widths[:column]) + COLUMN_GAP * (column + 0.5) + column_widths[column] / 2
        boxes.append(_Box(row, column, x, row * ROW_HEIGHT, width))
    return boxes, sum(column_widths) + COLUMN_GAP * len(columns)


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
    layers = node.layers
    if not layers:
        return ["inputs" if number == 0 else "outputs"]
    kind = "shards" if node.sharded else "replicas"
    several = f"{kind}: {', '.join(node.machines)}" if len(node.machines) > 1 else ""
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
    title = f"{plan.model}: {count_text(len(plan.stages), 'stage')} for {plan.objective}, {plan.origin}"
    if prediction is not None:
        title += (
            f"; predicted: {number_text(prediction.micro_batches_per_second)} micro-batches/s, "
            f"latency {seconds_text(prediction.latency_seconds)}"
        )
    return [
        (title, None),
        *((_machine_line(plan, machine), machine) for machine in machines),
        *((f"{stage.name}: {sharding_words(stage)}", None) for stage in plan.stages if stage.sharding),
        ("bold lines go to another machine, with the bytes of each micro-batch", None),
        *[(f"not drawn: {count_text(len(graph.hidden), 'layer')} without an input", None)] * bool(graph.hidden),
    ]


def _machine_line(plan: Plan, machine: str) -> str:
    """Return what a machine computes, with which other machines, and the predicted times."""
    stages = [stage for stage in plan.stages if machine in stage.machines]
    text = f"{machine}: {count_text(sum(len(stage.layers) for stage in stages), 'layer')}"
    for words, sharded in (("replicas with", False), ("shards with", True)):
        members = [stage.machines for stage in stages if (stage.sharding is not None) == sharded]
        partners = dict.fromkeys(name for names in members for name in names if name != machine)
        if partners:
            text += f", {words} {', '.join(partners)}"
    for times in plan.prediction.machines if plan.prediction is not None else ():
        if times.machine == machine:
            text += (
                f"; compute {seconds_text(times.compute_seconds)}, receive {seconds_text(times.receive_seconds)}, "
                f"send {seconds_text(times.send_seconds)}"
            )
    return text


def _draw_legend(root: Element, legend: Sequence[tuple[str, str | None]], colours: Mapping[str, int]) -> None:
    for line, (text, machine) in enumerate(legend):
        y = MARGIN + LEGEND_LINE * line
        x = MARGIN
        if machine is not None:
            _add(root, "rect", x=x, y=y, width=16, height=16, rx=3, fill=COLOURS[colours[machine]])
            x += 24
        _add(root, "text", text, x=x, y=y + 13, font_weight="bold" if line == 0 else "normal")


def _draw_node(
    drawing: Element, node: PictureNode, lines: Sequence[str], box: _Box, colours: Mapping[str, int]
) -> None:
    fill, colour = "#ffffff", "#000000"
    if node.machines:
        fill, colour = (palette[colours[node.machines[0]]] for palette in (COLOURS, TEXT_COLOURS))
    group = _add(drawing, "g")
    placed = f"{', '.join(node.machines)}, stage {node.stage}: {', '.join(node.layers)}"
    _add(group, "title", placed if node.machines else "the client")
    size = {"width": box.width, "height": NODE_HEIGHT}
    _add(group, "rect", x=box.x - box.width / 2, y=box.y, rx=6, fill=fill, stroke="#333333", **size)
    first = box.y + (NODE_HEIGHT / 2 + 5 if len(lines) == 1 else 15)
    for number, text in enumerate(lines):
        font_size = FONT_SIZE if number == 0 else SMALL_FONT_SIZE
        place = {"x": box.x, "y": first + 15 * number}
        _add(group, "text", text, text_anchor="middle", font_size=font_size, fill=colour, **place)


def _draw_edge(drawing: Element, edge: PictureEdge, boxes: Sequence[_Box], occupied: set[tuple[int, int]]) -> None:
    """Draw a curve from node to node, beside the column of the nodes that it would otherwise hide behind."""
    source, destination = boxes[edge.source], boxes[edge.destination]
    start, end = source.y + NODE_HEIGHT, destination.y
    middle = (start + end) / 2
    path = f"M {source.x:.1f} {start:.1f} C "
    if any((row, destination.column) in occupied for row in range(source.row + 1, destination.row)):
        column = [box for box in boxes if box.column == destination.column]
        side = max(box.x + box.width / 2 for box in column) + COLUMN_GAP / 3
        bend = ROW_HEIGHT - NODE_HEIGHT
        path += f"{source.x:.1f} {start + bend:.1f} {side:.1f} {start:.1f} {side:.1f} {start + bend:.1f} "
        path += f"L {side:.1f} {end - bend:.1f} C {side:.1f} {end:.1f} {destination.x:.1f} {end - bend:.1f} "
    else:
        path += f"{source.x:.1f} {middle:.1f} {destination.x:.1f} {middle:.1f} "
    path += f"{destination.x:.1f} {end:.1f}"
    colour, width = (TRANSFER_COLOUR, 2.5) if edge.crosses else (LINE_COLOUR, 1.2)
    _add(drawing, "path", d=path, fill="none", stroke=colour, stroke_width=width)


def _draw_bytes(drawing: Element, edges: Sequence[PictureEdge], boxes: Sequence[_Box]) -> None:
    """Draw the bytes with a white outline beside each line: at its end, or at its start if several lines end there."""
    labelled = [edge for edge in edges if edge.crosses and edge.bytes]
    ends = Counter(edge.destination for edge in labelled)
    starts = Counter(edge.source for edge in labelled)
    stacked: Counter[int] = Counter()
    for edge in labelled:
        source, destination = boxes[edge.source], boxes[edge.destination]
        if ends[edge.destination] > 1 and starts[edge.source] == 1:
            x, y = source.x + 5, source.y + NODE_HEIGHT + FONT_SIZE
        else:
            x, y = destination.x + 5, destination.y - 6 - SMALL_FONT_SIZE * stacked[edge.destination]
            stacked[edge.destination] += 1
        outline: dict[str, str | float] = {"stroke": "#ffffff", "stroke_width": 3, "paint_order": "stroke"}
        _add(drawing, "text", bytes_text(edge.bytes), x=x, y=y, font_size=SMALL_FONT_SIZE, **outline)


def _text_width(text: str) -> float:
    return cell_len(text) * CHARACTER_WIDTH
