"""Every codec: its decoded values, their error, and that invalid bytes are rejected."""

import contextlib
import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from hypothesis.extra import numpy as arrays

from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.program.codecs import CODECS, by_channel
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.program import RouteCodec
from rpc_runtime.program.routes import Route, require_available
from rpc_runtime.program.specs import TensorSpec
from tests.helpers.toy import toy_plugin_installed

LOSSY = ("fp16", "bf16", "int8")
LOSSLESS = ("lz4", "zstd")
DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (2, 0, 3), (1,), (1, 3, 2, 2), (2, 5, 3, 1), (7, 4), (3, 4, 5), (2, 2, 2, 2, 3)]),
    arrays.array_shapes(min_dims=1, max_dims=5, max_side=6),
)


def spec_of(array: np.ndarray) -> TensorSpec:
    return TensorSpec("cut", array.shape, array.dtype.name)


def passed(codec: str, array: np.ndarray) -> tuple[np.ndarray, int]:
    """Return an array after encoding and decoding, and its encoded size in bytes."""
    tensor = spec_of(array)
    sender, receiver = CODECS[codec](tensor), CODECS[codec](tensor)
    before = array.tobytes()
    encoded = sender.to_wire(flat_bytes(array))
    assert array.tobytes() == before, "the sender's tensor was changed"
    data = np.full(tensor.size_bytes, 0xAA, np.uint8)
    receiver.from_wire(encoded.copy(), data)
    return data.view(array.dtype).reshape(array.shape), encoded.size


@st.composite
def tensors(draw: Any, dtypes: tuple[str, ...]) -> np.ndarray:
    """Return arrays of random bits, or repeated ones, which can be compressed."""
    tensor = TensorSpec("cut", draw(SHAPES), draw(st.sampled_from(dtypes)))
    seed, few = draw(st.integers(0, 2**32 - 1)), draw(st.booleans())
    content = np.random.default_rng(seed).integers(0, 2 if few else 256, tensor.size_bytes, np.uint8)
    if tensor.dtype == "bool":
        content &= 1
    return content.view(np.dtype(tensor.dtype)).reshape(tensor.shape)


@pytest.mark.parametrize("codec", LOSSLESS)
@given(array=tensors(DTYPES))
def test_what_is_compressed_comes_back_bit_by_bit(codec: str, array: np.ndarray) -> None:
    arrived, size = passed(codec, array)
    assert arrived.tobytes() == array.tobytes()
    assert size <= array.nbytes


@st.composite
def floats(draw: Any) -> np.ndarray:
    """Return floats of every magnitude of their dtype, NaN and infinities included."""
    dtype = np.dtype(draw(st.sampled_from(("float32", "float64"))))
    return draw(arrays.arrays(dtype, draw(SHAPES), elements=arrays.from_dtype(dtype)))


@pytest.mark.parametrize("codec", LOSSY)
@given(array=st.one_of(floats(), tensors(("float32", "float64"))))
def test_lossy_codecs_round_and_do_nothing_else(codec: str, array: np.ndarray) -> None:
    """Tensors with values that a codec cannot represent are sent unencoded; NaN and infinities are kept."""
    assume(not CODECS[codec](spec_of(array)).unfit)
    arrived, size = passed(codec, array)
    if size == array.nbytes:
        assert arrived.tobytes() == array.tobytes()
        assert not_held(codec, array)
        return
    assert size == CODECS[codec](spec_of(array)).encoded_bytes
    assert np.array_equal(np.isfinite(arrived), np.isfinite(array))
    assert np.array_equal(arrived[np.isinf(array)], array[np.isinf(array)])
    finite = np.isfinite(array)
    off = np.abs(arrived[finite].astype(np.longdouble) - array[finite].astype(np.longdouble))
    assert (off <= allowed(codec, array)[finite]).all()


def not_held(codec: str, array: np.ndarray) -> bool:
    """Return whether the codec cannot represent some value."""
    if codec == "int8":
        return not np.isfinite(array).all() or np.abs(array).max() > 0.999 * np.finfo(np.float32).max
    largest = 65519.9 if codec == "fp16" else 3.39e38
    return bool((np.abs(array[np.isfinite(array)]) > largest).any())


def allowed(codec: str, array: np.ndarray) -> np.ndarray:
    """Return the maximum error of each value: half a step of the narrow dtype, or of its channel's scale."""
    magnitudes = np.abs(np.where(np.isfinite(array), array, 0)).astype(np.longdouble)
    if codec == "fp16":
        return magnitudes * 2.0**-11 + 2.0**-25
    if codec == "bf16":
        return magnitudes * 2.0**-8 + 2.0**-134
    channels = magnitudes.reshape(by_channel(array.shape))
    largest = channels.max(axis=(0, 2), keepdims=True)
    step = np.maximum(largest / 127, np.finfo(np.float32).tiny)
    return np.broadcast_to(step * 0.50001, channels.shape).reshape(array.shape)


@pytest.mark.parametrize("codec", [*CODECS])
def test_what_codecs_fit(codec: str) -> None:
    is_lossy = CODECS[codec].is_lossy
    fits = {dtype for dtype in DTYPES if not CODECS[codec](TensorSpec("x", (4, 4), dtype)).unfit}
    assert fits == ({"float32", "float64"} if is_lossy else set(DTYPES))
    assert bool(CODECS[codec](TensorSpec("x", (0, 4), "float32")).unfit) == is_lossy
    # With its scale, int8 would take more bytes than the value.
    assert bool(CODECS[codec](TensorSpec("x", (1, 1), "float32")).unfit) == (codec == "int8")


TENSOR = TensorSpec("cut", (2, 3, 4, 4), "float32")


def zstd_frame(content: bytes, **options: Any) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(**options).compress(content)


def forged(codec: str) -> dict[str, bytes]:
    import lz4.block

    size = TENSOR.size_bytes
    if codec == "int8":
        numbers = bytes(size // 4)
        return {
            f"a scale of {scale}": struct.pack("<3f", 1, scale, 1) + numbers
            for scale in (float("nan"), float("inf"), -1.0, 0.0, 3.4e38)
        }
    if codec == "lz4":
        return {
            "garbage": b"\xff" * 20,
            "cut off": lz4.block.compress(bytes(size), store_size=False)[:-2],
            "too little": lz4.block.compress(bytes(size - 1), store_size=False),
            "too much": lz4.block.compress(bytes(size + 1), store_size=False),
            "a bomb": lz4.block.compress(bytes(size * 100), store_size=False)[: size - 1],
        }
    frame = zstd_frame(bytes(size))
    return {
        "garbage": b"\xff" * 20,
        "cut off": frame[:-1],
        "more behind it": frame + b"\0",
        "two frames": frame * 2,
        "too little": zstd_frame(bytes(size - 1)),
        "too much": zstd_frame(bytes(size + 1)),
        "a bomb": zstd_frame(bytes(1 << 28)),
        "of unknown size": zstd_frame(bytes(size), write_content_size=False),
    }


@pytest.mark.parametrize(("codec", "what"), [(codec, what) for codec in ("int8", *LOSSLESS) for what in forged(codec)])
def test_forged_encodings_are_refused_by_name(codec: str, what: str) -> None:
    encoded = np.frombuffer(forged(codec)[what], np.uint8)
    with pytest.raises(
        ProtocolError, match=rf"tensor cut: float32\[2, 3, 4, 4\] came as {encoded.size} bytes of {codec}"
    ):
        CODECS[codec](TENSOR).from_wire(encoded, np.empty(TENSOR.size_bytes, np.uint8))


@pytest.mark.parametrize("codec", LOSSLESS)
@given(garbage=st.binary(min_size=1, max_size=TENSOR.size_bytes - 1), flips=st.lists(st.integers(0, 30), max_size=3))
def test_no_garbage_does_more_than_be_refused(codec: str, garbage: bytes, flips: list[int]) -> None:
    coded, data = CODECS[codec](TENSOR), np.empty(TENSOR.size_bytes, np.uint8)
    damaged = coded.to_wire(np.zeros(TENSOR.size_bytes, np.uint8)).copy()
    for place in flips:
        damaged[place % damaged.size] ^= 0x5A
    for encoded in (np.frombuffer(garbage, np.uint8), damaged):
        with contextlib.suppress(ProtocolError):
            coded.from_wire(encoded, data)


@pytest.mark.parametrize(("codec", "package"), [("lz4", "lz4"), ("zstd", "zstandard")])
def test_a_missing_library_is_named(codec: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    route = Route(0, TENSOR, "desk", "box", 3, codec=codec)
    require_available([route])
    monkeypatch.setitem(sys.modules, {"lz4": "lz4.block"}.get(package, package), None)
    assert not CODECS[codec].is_available()
    with pytest.raises(WorkerError, match=rf"'cut' goes from 'desk' to 'box' as {codec}, which needs .*'{package}'"):
        require_available([route])


def test_an_installed_package_adds_a_codec() -> None:
    array = np.float32([[1.0, 2.0, 0.0, 0.0]])
    with toy_plugin_installed():
        arrived, size = passed("toy-trim", array)
    assert size == 8
    np.testing.assert_array_equal(arrived, array)
    with pytest.raises(ValueError, match="no codec 'toy-shorter'; there are: none, fp16"):
        RouteCodec("x", "a", "b", "toy-shorter")
