"""Images of a folder as inputs of a network that takes (batch, 3, height, width)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rpc_runtime.errors import InputError, TvmSplitError
from rpc_runtime.program.program import TensorSpec
from tvm_split.cli.inputs import Arrays, MicroBatches

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STANDARD_DEVIATION = (0.229, 0.224, 0.225)
RESIZE_OVER_CROP = 256 / 224
"""The shorter side is resized to this many times the crop: the usual evaluation of networks trained on ImageNet."""


def images_of_folder(
    expected: Sequence[TensorSpec],
    folder: Path,
    size: int | None,
    mean: Sequence[float] = IMAGENET_MEAN,
    standard_deviation: Sequence[float] = IMAGENET_STANDARD_DEVIATION,
) -> MicroBatches:
    """The images of a folder, by name, resized, cropped in the middle and normalised.

    They fill micro-batches of the model's batch size. The last image is repeated where they do not fill the last one;
    ``about["padding"]`` counts the repetitions.

    Raises:
        InputError: the model takes no images, or the folder has none.
        TvmSplitError: Pillow is not installed.
    """
    _require_pillow()
    spec = _image_input(expected, size)
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not paths:
        raise InputError(f"{folder} is no folder with images ({', '.join(sorted(SUFFIXES))})")
    batch, _, height, _ = spec.shape
    count = math.ceil(len(paths) / batch)
    centre, spread = _per_channel(mean), _per_channel(standard_deviation)

    def make(index: int) -> Arrays:
        chosen = [paths[min(position, len(paths) - 1)] for position in range(index * batch, (index + 1) * batch)]
        pixels = np.stack([_pixels(path, height) for path in chosen])
        return (((pixels - centre) / spread).astype(np.dtype(spec.dtype)),)

    names = [path.name for path in paths]
    return MicroBatches(count, make, {"inputs": str(folder), "images": names, "padding": count * batch - len(paths)})


def _image_input(expected: Sequence[TensorSpec], size: int | None) -> TensorSpec:
    wanted = ", ".join(map(str, expected))
    if len(expected) != 1 or len(expected[0].shape) != 4 or expected[0].shape[1] != 3:
        raise InputError(f"images need a model with one input (batch, 3, height, width); this one takes {wanted}")
    height, width = expected[0].shape[2:]
    if height != width or size not in (None, height):
        raise InputError(f"the model takes {wanted}; images would be {size or height} × {size or height}")
    if not expected[0].dtype.startswith(("float", "bfloat")):
        raise InputError(f"images are normalised to floating-point values; the model takes {wanted}")
    return expected[0]


def _per_channel(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).reshape(3, 1, 1)


def _require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise TvmSplitError("reading images needs Pillow: pip install 'tvm-split[images]' or pillow") from None


def _pixels(path: Path, size: int) -> np.ndarray:
    """One image as float32 (3, size, size) between 0 and 1."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            image: Any = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{path} cannot be read as an image: {error}") from error
    scale = round(size * RESIZE_OVER_CROP) / min(image.size)
    width, height = (max(size, round(length * scale)) for length in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255
