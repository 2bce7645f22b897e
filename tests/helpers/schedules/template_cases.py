"""A kernel for each template, and the template it belongs to."""

from tvm import relax

from schedules import cpu
from schedules.traits import traits_of
from tests.helpers.schedules.schedule_harness import HOST, graph_of, normal, unscheduled

TRAITS = traits_of(HOST)


def convolution(channels, outputs, size, groups=1, stride=1):
    weight = normal(1, outputs, channels // groups, 3, 3)

    def graph(builder, x):
        y = builder.emit(relax.op.nn.conv2d(x, relax.const(weight), padding=1, strides=stride, groups=groups))
        return builder.emit(relax.op.nn.relu(y))

    return graph, normal(0, 1, channels, size, size)


def product(rows, depth, columns):
    weight = normal(1, depth, columns)
    return (lambda builder, x: builder.emit(relax.op.matmul(x, relax.const(weight)))), normal(0, rows, depth)


CASES = {
    "conv2d": convolution(32, 48, 12, stride=2),  # Winograd is for strides of 1
    "depthwise_conv2d": convolution(32, 32, 12, groups=32, stride=2),
    "matmul": product(24, 128, 48),
}


def template_and_function(name):
    graph, data = CASES[name]
    template = next(candidate for candidate in cpu.TEMPLATES if candidate.name == name)
    functions = unscheduled(graph_of(graph, [data]), HOST)
    return template, next(function for function in functions if template.space(function, TRAITS) is not None)
