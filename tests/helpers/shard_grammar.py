"""Random networks of the blocks of published ones, and random regions of them: a grammar for tests of sharding.

A network is a chain of blocks. Each takes one of the earlier values, an image [batch, channels, rows, columns] or
tokens [batch, tokens, channels]. All choices are of one ``Random``, whose seed gives the same network again.
"""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from relay_passes.ir import constant, main_function, operations_of, shape_of
from relay_passes.sharding.region import Region
from tests.helpers.shard_networks import Network
from tests.helpers.sharded_graphs import region_of

Block = Callable[[Random, Network, relax.Var], relax.Var | None]
"""Adds operations on a value to a network and returns the last; None if the value's shape does not permit them."""


def _divisors(length: int) -> list[int]:
    return [count for count in (2, 3, 4) if length % count == 0]


def _reshaped(network: Network, x: relax.Expr, *shape: int) -> relax.Var:
    return network.add(op.reshape(x, shape))


def _permuted(network: Network, x: relax.Expr, *axes: int) -> relax.Var:
    return network.add(op.permute_dims(x, list(axes)))


def _channels(network: Network, x: relax.Expr, begin: int, end: int, axis: int = 1) -> relax.Var:
    return network.add(op.strided_slice(x, [axis], [begin], [end]))


def _resolution(x: relax.Expr) -> tuple[int, ...]:
    return shape_of(x)[2:]


def convolution(random: Random, network: Network, x: relax.Var) -> relax.Var:
    channels = random.choice([6, 8, 12])
    groups = random.choice([1, 1, *(count for count in _divisors(shape_of(x)[1]) if channels % count == 0)])
    return network.convolution(x, channels, random.choice([1, 3]), groups)


def depthwise(random: Random, network: Network, x: relax.Var) -> relax.Var:
    channels = shape_of(x)[1]
    return network.convolution(x, channels * random.choice([1, 1, 2]), 3, channels)


def strided(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    channels, rows, _ = shape_of(x)[1:]
    groups = random.choice([1, channels])
    kernel = random.choice([2, 3])
    weight = network.weight(channels, channels // groups, kernel, kernel)
    return network.add(op.nn.conv2d(x, weight, strides=2, padding=kernel // 2, groups=groups)) if rows > 4 else None


def shuffle(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    batch, channels, rows, columns = shape_of(x)
    if not _divisors(channels):
        return None
    groups = random.choice(_divisors(channels))
    turned = _permuted(network, _reshaped(network, x, batch, groups, channels // groups, rows, columns), 0, 2, 1, 3, 4)
    return _reshaped(network, turned, *shape_of(x))


def ghost(random: Random, network: Network, x: relax.Var) -> relax.Var:
    return ghost_of(network, x, random.choice([shape_of(x)[1], 7, 12]))


def ghost_of(network: Network, x: relax.Var, channels: int) -> relax.Var:
    """A product and a depthwise one of it; the first of their channels."""
    first = network.convolution(x, -(-channels // 2), 1)
    both = network.add(op.concat([first, network.convolution(first, shape_of(first)[1], 3, shape_of(first)[1])], 1))
    return _channels(network, both, 0, channels)


def dense(random: Random, network: Network, x: relax.Var) -> relax.Var:
    fields = [x, network.convolution(x, random.choice([4, 6]), 3)]
    random.shuffle(fields)
    return network.add(op.concat(fields, 1))


def twins(random: Random, network: Network, x: relax.Var) -> relax.Var:
    """Two branches side by side, and a convolution by groups of both."""
    channels = random.choice([4, 8])
    both = network.add(op.concat([network.convolution(x, channels, 1), network.convolution(x, channels, 3)], 1))
    return network.convolution(both, random.choice([8, 16]), 3, random.choice([1, 2, 4]))


def sections(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    """Sections of the channels, each convolved with the one before it, as in Res2Net; slices or a split."""
    channels = shape_of(x)[1]
    if not _divisors(channels):
        return None
    count = random.choice(_divisors(channels))
    width = channels // count
    if random.random() < 0.5:
        pieces = network.add(op.split(x, count, 1))
        fields = [network.add(relax.TupleGetItem(pieces, place)) for place in range(count)]
    else:
        fields = [_channels(network, x, place * width, (place + 1) * width) for place in range(count)]
    results = [fields[0]]
    for field in fields[1:]:
        joined = network.add(op.add(field, results[-1])) if random.random() < 0.5 else field
        results.append(network.convolution(joined, width, 3))
    return network.add(op.concat(results, 1))


def partly_added(random: Random, network: Network, x: relax.Var) -> relax.Var:
    """A residual of a part of the channels, as in ReXNet and DPN."""
    channels = shape_of(x)[1]
    branch = network.convolution(x, channels + random.choice([2, 4]), 1)
    added = network.add(op.add(_channels(network, branch, 0, channels), x))
    return network.add(op.concat([added, _channels(network, branch, channels, shape_of(branch)[1])], 1))


def gate(random: Random, network: Network, x: relax.Var) -> relax.Var:
    pooled = network.add(op.mean(x, [2, 3], keepdims=True))
    hidden = network.add(op.nn.silu(network.convolution(pooled, 4, 1)))
    return network.add(op.multiply(x, network.add(op.sigmoid(network.convolution(hidden, shape_of(x)[1], 1)))))


def resized(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    rows, columns = _resolution(x)
    if rows > 8:
        return None
    tables = [constant(_indices(length)) for length in (rows, columns)]
    return network.add(op.take(network.add(op.take(x, tables[0], 2, mode="fast")), tables[1], 3, mode="fast"))


def _indices(length: int) -> np.ndarray:
    return np.arange(2 * length) // 2


def padded(random: Random, network: Network, x: relax.Var) -> relax.Var:
    widths = [random.choice([0, 1]) for _ in range(4)]
    return network.add(op.nn.pad(x, [0, 0, random.choice([0, 0, 2]), 0, *widths]))


def pool(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    kind = random.choice([op.nn.max_pool2d, op.nn.avg_pool2d])
    kernel, stride, padding = random.choice([(2, 2, 0), (3, 1, 1), (3, 2, 1)])
    return network.add(kind(x, (kernel, kernel), (stride, stride), padding)) if _resolution(x)[0] > 4 else None


def batch_norm(random: Random, network: Network, x: relax.Var) -> relax.Var:
    return network.batch_norm(x)


def norm_of_channels(random: Random, network: Network, x: relax.Var) -> relax.Var:
    """A layer norm of each pixel and two products, as in ConvNeXt."""
    normed = network.layer_norm(_permuted(network, x, 0, 2, 3, 1))
    return network.add(op.add(x, _permuted(network, products(random, network, normed), 0, 3, 1, 2)))


def group_norm(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    channels = shape_of(x)[1]
    groups = random.choice([1, *_divisors(channels)])
    return network.add(op.nn.group_norm(x, network.positive(channels), network.weight(channels), groups, 1, [2, 3]))


def windows(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    """Attention in windows of 2 by 2 pixels, perhaps of an image that is rolled."""
    batch, channels, rows, columns = shape_of(x)
    if rows % 2 or columns % 2 or channels % 2:
        return None
    if random.random() < 0.5:
        x = network.add(op.concat([_channels(network, x, 1, rows, 2), _channels(network, x, 0, 1, 2)], 2))
    pieces = _reshaped(network, x, batch, channels, rows // 2, 2, columns // 2, 2)
    shape = (batch * rows * columns // 4, 4, channels)
    tokens = _reshaped(network, _permuted(network, pieces, 0, 2, 4, 3, 5, 1), *shape)
    mixed = attention(random, network, tokens)
    back = _reshaped(network, mixed, batch, rows // 2, columns // 2, 2, 2, channels)
    return _reshaped(network, _permuted(network, back, 0, 5, 1, 3, 2, 4), batch, channels, rows, columns)


def to_tokens(random: Random, network: Network, x: relax.Var) -> relax.Var:
    batch, channels, rows, columns = shape_of(x)
    return _permuted(network, _reshaped(network, x, batch, channels, rows * columns), 0, 2, 1)


def activation(random: Random, network: Network, x: relax.Var) -> relax.Var:
    return network.add(random.choice([op.nn.relu, op.nn.gelu, op.sigmoid])(x))


def layer_norm(random: Random, network: Network, x: relax.Var) -> relax.Var:
    return network.layer_norm(x)


def products(random: Random, network: Network, x: relax.Var) -> relax.Var:
    hidden = network.linear(x, random.choice([6, 8, 16]))
    return network.linear(network.add(op.nn.gelu(hidden)), shape_of(x)[-1])


def token_mixer(random: Random, network: Network, x: relax.Var) -> relax.Var:
    turned = _permuted(network, network.layer_norm(x), 0, 2, 1)
    mixed = network.linear(turned, shape_of(x)[1]) if random.random() < 0.5 else products(random, network, turned)
    return network.add(op.add(x, _permuted(network, mixed, 0, 2, 1)))


def gated_mixer(random: Random, network: Network, x: relax.Var) -> relax.Var:
    """The spatial gating unit of gMLP: one half of the channels, mixed over tokens, is a factor of the other half."""
    width = shape_of(x)[2]
    halves = network.add(op.split(network.add(op.nn.gelu(network.linear(network.layer_norm(x), 2 * width))), 2, 2))
    left, right = (network.add(relax.TupleGetItem(halves, place)) for place in (0, 1))
    turned = network.linear(_permuted(network, network.layer_norm(right), 0, 2, 1), shape_of(x)[1])
    product = network.add(op.multiply(left, _permuted(network, turned, 0, 2, 1)))
    return network.add(op.add(x, network.linear(product, width)))


def attention(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    width = shape_of(x)[2]
    if width % 2:
        return None
    heads, form = random.choice(_divisors(width)), random.choice(FORMS)
    return attention_of(network, x, form, heads, random.choice([1, heads]), width // heads)


FORMS = ("one matrix, then a reshape", "one matrix, then a split", "three matrices")
"""How queries, keys and values are made; of three matrices, keys and values may have fewer heads."""


def attention_of(network: Network, x: relax.Var, form: str, heads: int, groups: int, depth: int) -> relax.Var:
    """Attention with a mask and a residual; of three matrices, keys and values have ``groups`` heads."""
    batch, tokens, width = shape_of(x)

    def by_heads(value: relax.Expr, count: int) -> relax.Var:
        return _permuted(network, _reshaped(network, value, batch, tokens, count, depth), 0, 2, 1, 3)

    if form == "one matrix, then a reshape":
        fused = _reshaped(network, network.linear(x, 3 * heads * depth), batch, tokens, 3, heads, depth)
        turned = _permuted(network, fused, 2, 0, 3, 1, 4)
        parts = [network.add(op.squeeze(_channels(network, turned, at, at + 1, 0), [0])) for at in range(3)]
    elif form == "one matrix, then a split":
        pieces = network.add(op.split(network.linear(x, 3 * heads * depth), 3, 2))
        parts = [by_heads(network.add(relax.TupleGetItem(pieces, place)), heads) for place in range(3)]
    else:
        parts = [by_heads(network.linear(x, heads * depth), heads)]
        for _ in range(2):
            shared = by_heads(network.linear(x, groups * depth), groups)
            if groups != heads:
                wide = (batch, groups, heads // groups, tokens, depth)
                shared = network.add(op.broadcast_to(network.add(op.expand_dims(shared, 2)), wide))
                shared = _reshaped(network, shared, batch, heads, tokens, depth)
            parts.append(shared)
    query, key, value = parts
    scores = network.add(op.matmul(query, _permuted(network, key, 0, 1, 3, 2)))
    scores = network.add(op.add(scores, network.weight(1, 1, tokens, tokens)))
    mixed = _permuted(network, network.add(op.matmul(network.add(op.nn.softmax(scores, -1)), value)), 0, 2, 1, 3)
    return network.add(op.add(x, network.linear(_reshaped(network, mixed, batch, tokens, heads * depth), width)))


def class_token(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    """A token more, or without it the first again, as in class attention."""
    _, tokens, width = shape_of(x)
    if random.random() < 0.5 and tokens > 4:
        first = _channels(network, x, 0, 1)
        return network.add(op.concat([network.linear(first, width), _channels(network, x, 1, tokens)], 1))
    return network.add(op.concat([network.weight(shape_of(x)[0], 1, width), x], 1))


def to_image(random: Random, network: Network, x: relax.Var) -> relax.Var | None:
    batch, tokens, width = shape_of(x)
    columns = next((count for count in (8, 6, 4) if tokens % count == 0), 0)
    return (
        _reshaped(network, _permuted(network, x, 0, 2, 1), batch, width, tokens // columns, columns)
        if columns
        else None
    )


ON_IMAGES: Sequence[Block] = (
    convolution, convolution, depthwise, strided, shuffle, ghost, dense, twins, sections, partly_added, gate, resized,
    padded, pool, batch_norm, norm_of_channels, group_norm, windows, to_tokens, activation,
)  # fmt: skip
ON_TOKENS: Sequence[Block] = (
    layer_norm, products, products, token_mixer, token_mixer, gated_mixer, attention, class_token, to_image, activation,
)  # fmt: skip


def network_of(random: Random, blocks: int) -> tvm.IRModule:
    """Return a network of so many blocks, with two outputs, one of them from anywhere."""
    is_image = random.random() < 0.65
    size = (random.choice([4, 6, 8]),) * 2 if is_image else (random.choice([4, 16]),)
    channels = random.choice([4, 6, 8, 16])
    network = Network((1, channels, *size) if is_image else (1, *size, channels), random.randrange(100))
    values = [network.add(op.nn.relu(network.input)) if random.random() < 0.5 else network.input]
    while blocks > 0:
        blocks -= 1
        x = values[-1] if random.random() < 0.8 else random.choice(values)
        result = random.choice(ON_IMAGES if len(shape_of(x)) == 4 else ON_TOKENS)(random, network, x)
        if result is None:
            continue
        alike = [value for value in values if shape_of(value) == shape_of(result)]
        if alike and random.random() < 0.3:
            result = network.add(op.add(result, random.choice(alike)))
        beside = [value for value in values if _joinable(value, result)]
        if beside and random.random() < 0.1:
            result = network.add(op.concat([random.choice(beside), result], 1))
        values.append(result)
    last = network.add(op.nn.relu(values[-1]))
    return network.module(last, random.choice([last, *(value for value in values if value is not network.input)]))


def _joinable(value: relax.Expr, beside: relax.Expr) -> bool:
    shapes = shape_of(value), shape_of(beside)
    return len(shapes[0]) == len(shapes[1]) == 4 and shapes[0][2:] == shapes[1][2:] and shapes[0][1] + shapes[1][1] < 40


def random_region(random: Random, module: tvm.IRModule) -> Region:
    """Return operations that stand together, of two to four machines with shares of any size."""
    names = [binding.var.name for binding in operations_of(main_function(module))]
    first = random.randrange(len(names))
    last = random.randrange(first, len(names))
    if random.random() < 0.3:
        first, last = 0, len(names) - 1
    parts = [random.randint(1, 5) for _ in range(random.choice([2, 2, 3, 4]))]
    if random.random() < 0.3:
        parts = [1, 1]
    return region_of(module, [part / sum(parts) for part in parts], first, names[last])
