"""Write the images of a folder as inputs of ``tvm-split run``, for a network that takes (batch, 3, size, size).

    python examples/images_to_npz.py photos inputs.npz --batch 8
    tvm-split run bundle --inputs inputs.npz --output scores.npz

The images are resized, cropped in the middle and normalised as ImageNet's usually are. The last one is repeated until
the last micro-batch is full. It needs Pillow: ``pip install pillow``.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
RESIZE_OVER_CROP = 256 / 224
"""The shorter side is resized to this many times the crop: the usual evaluation of networks trained on ImageNet."""


def pixels_of(path: Path, size: int) -> np.ndarray:
    """One image as float32 (3, size, size) between 0 and 1."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    scale = round(size * RESIZE_OVER_CROP) / min(image.size)
    width, height = (max(size, round(length * scale)) for length in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path, help="the .npz file to write")
    parser.add_argument("--batch", type=int, default=1, help="images of a micro-batch")
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    parser.add_argument("--mean", type=float, nargs=3, default=(0.485, 0.456, 0.406))
    parser.add_argument("--std", type=float, nargs=3, default=(0.229, 0.224, 0.225))
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        parser.error(f"{arguments.folder} has no images ({', '.join(sorted(SUFFIXES))})")
    paths += [paths[-1]] * (-len(paths) % arguments.batch)
    images = np.stack([pixels_of(path, arguments.size) for path in paths])
    mean, deviation = (np.asarray(values, np.float32).reshape(3, 1, 1) for values in (arguments.mean, arguments.std))
    normalised = (images - mean) / deviation
    np.savez(arguments.output, normalised.reshape(-1, arguments.batch, *normalised.shape[1:]))
    print(f"{len(paths)} images in {len(paths) // arguments.batch} micro-batches written to {arguments.output}")


if __name__ == "__main__":
    main()
