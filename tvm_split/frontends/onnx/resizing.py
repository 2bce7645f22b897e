"""Convert ONNX's Resize and Upsample."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.onnx.reference import OnnxReference
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, shape_of, wide


def resize(op: Operators, call: Any) -> relax.Expr:
    """Resize one axis after the other, by a matrix of onnxruntime's own weights.

    TVM's importer maps coordinates by the ratio of the sizes, where ONNX maps them by the scale that it is given; it
    ignores ``antialias``, ``exclude_outside`` and ``axes``.
    """
    data, is_old = call.operands[0], call.opset < 11
    dtype, shape, rank = dtype_of(data), shape_of(data), len(shape_of(data))
    axes = [axis % rank for axis in call.get("axes", range(rank))]
    scales = call.get("scales") if call.opset < 9 else call.numbers(1 if is_old else 2, "scales")
    has_scales = scales is not None and len(scales) > 0
    factors = np.asarray(scales if has_scales else call.numbers(3, "sizes"), "float32" if has_scales else "int64")
    lengths = np.array([shape[axis] for axis in axes], "float32")
    if np.array_equal(np.floor(factors * lengths) if has_scales else factors, lengths):
        return data  # whatever the scales are, as in onnxruntime
    if call.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise ModelImportError("it keeps the ratio of the sizes; give it the sizes themselves, with the policy stretch")
    attributes = {name: call[name] for name in _RESIZING if name in call.attributes}
    is_cropped = attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize"
    region = call.numbers(1, "region") if is_cropped else np.repeat([0, 1], len(axes))
    if call.get("mode", b"nearest") != b"nearest":
        data = op.cast(data, wide(dtype) if is_float(dtype) else "float32")
    inside = np.ones([1] * rank, bool)
    for axis, factor, *ends in zip(axes, factors, *np.split(region, 2), strict=True):
        if factor == (1 if has_scales else shape[axis]):
            continue
        if is_old:
            attributes |= {
                "coordinate_transformation_mode": "asymmetric",
                "nearest_mode": "ceil" if factor < 1 else "floor",
            }
        weights = _resizing_weights(shape[axis], factor, ends, attributes)
        is_inside = weights.any(axis=1)
        weights[~is_inside, 0] = 1
        data = compositions.weighted(op, data, weights, axis)
        inside = inside & is_inside.reshape([-1 if place == axis else 1 for place in range(rank)])
    if not inside.all():
        data = op.where(constant(inside, "bool"), data, call.get("extrapolation_value", 0.0))
    return op.cast(data, dtype)


_RESIZING = (
    "mode", "coordinate_transformation_mode", "nearest_mode", "cubic_coeff_a", "antialias", "exclude_outside",
)  # fmt: skip
"""The attributes of Resize that decide the weights of an axis."""


def _resizing_weights(
    size: int, factor: Any, ends: Sequence[float], attributes: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    """Return the matrix [new size, size] of one axis; ``factor`` is its scale (float) or its new size (integer).

    A row is 0 where the new element lies outside of the region from ``ends[0]`` to ``ends[1]``.
    """
    # onnxruntime copies a tensor whose sizes do not change, so another axis, of one element, is doubled.
    has_scale = isinstance(factor, np.floating)
    values = {
        "region": np.array([0, 0, ends[0], 0, 1, 1, ends[1], 1], "float32"),
        "scales": np.array([1, 1, factor, 2] if has_scale else [], "float32"),
        **({} if has_scale else {"sizes": np.array([size, 1, factor, 2], "int64")}),
    }
    node = helper.make_node("Resize", ["vectors", *values], ["weights"], **attributes)
    # onnxruntime warns of this mode beyond opset 12, which no longer has it.
    opset = 11 if attributes.get("coordinate_transformation_mode") == b"tf_half_pixel_for_nn" else 19
    kinds = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("vectors", "weights")]
    constants = [numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = helper.make_graph([node], "resize", kinds[:1], kinds[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    vectors = np.eye(size, dtype="float32")[:, None, :, None]
    (resized,) = OnnxReference(model, ["vectors"], {}).outputs([vectors])
    return np.array(resized[:, 0, :, 0].T)
