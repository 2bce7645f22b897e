# ruff: noqa: E501
# fmt: off
"""Cases of the torch sweep: what takes elements from where they lie, makes tensors, or resizes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.frontends.torch_case import Cases, booleans, integers

CASES = Cases()
module, function = CASES.module, CASES.function

# Indexing
function("select_negative", lambda x: x[:, -1], (3, 4, 5))
function("select_negative_2", lambda x: x.select(-1, -2), (3, 4))
function("select_positive", lambda x: x[1], (3, 4))
function("slice_step", lambda x: x[:, 1:7:2], (3, 9))
function("slice_negative", lambda x: x[:, -3:-1], (3, 9))
function("slice_beyond", lambda x: x[:, 2:100], (3, 9))
function("slice_empty_start", lambda x: x[-100:2], (3, 9))
function("slice_reversed", lambda x: x[:, 4:2], (3, 9))
function("slice_scatter_open_end", lambda x, y: x.slice_scatter(y, 1, 1, None, 2), (3, 5), (3, 2))
function("slice_scatter_open_start", lambda x, y: x.slice_scatter(y, 1, None, -1, 3), (3, 5), (3, 2))
function("slice_scatter_beyond", lambda x, y: x.slice_scatter(y, 1, -100, 2), (3, 5), (3, 2))
function("slice_scatter_reversed", lambda x, y: x.slice_scatter(y, 1, 4, 2), (3, 5), (3, 0))
function("slice_ellipsis", lambda x: x[..., None, ::3], (3, 9))
function("index_tensor", lambda x, i: x[i], (5, 4), integers(0, 5, 3))
function("index_tensor_negative", lambda x, i: x[i], (5, 4), integers(-5, 0, 3))
function("index_tensor_second_axis", lambda x, i: x[:, i], (3, 5, 2), integers(-5, 5, 2, 2))
function("index_two_tensors", lambda x, i, j: x[i, j], (5, 4, 3), integers(-5, 5, 3), integers(-4, 4, 3))
function("index_two_apart", lambda x, i, j: x[i, :, j], (5, 4, 3), integers(-5, 5, 6), integers(-3, 3, 6))
function("index_two_last", lambda x, i, j: x[:, i, j], (2, 5, 4), integers(-5, 5, 6), integers(-4, 4, 6))
function("index_broadcast", lambda x, i, j: x[i[:, None], j], (5, 4), integers(-5, 5, 2), integers(-4, 4, 3))
function("index_list", lambda x: x[[0, -1, 2]], (5, 4))
function("gather", lambda x, i: x.gather(1, i), (3, 5), integers(0, 5, 3, 2))
function("gather_smaller", lambda x, i: x.gather(0, i), (5, 4), integers(0, 5, 2, 3))
function("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (3, 5), integers(0, 5, 3, 2))
function("take", torch.take, (3, 5), integers(-15, 15, 4))
function("index_select", lambda x, i: x.index_select(1, i), (3, 5), integers(0, 5, 4))
function("index_select_negative_axis", lambda x, i: x.index_select(-1, i), (3, 5, 2), integers(0, 2, 4))
function("scatter", lambda x, s: x.scatter(1, torch.tensor([[0, 2], [1, 0], [3, 1]]), s), (3, 5), (3, 2))
function("scatter_value", lambda x: x.scatter(1, torch.tensor([[0, 2], [1, 0], [3, 1]]), 7.0), (3, 5))
function("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), (3, 5), integers(0, 5, 3, 4), (3, 4))
function("scatter_reduce", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), (3, 5), integers(0, 5, 3, 4), (3, 4))
function("index_add", lambda x, i, s: x.index_add(0, i, s), (5, 3), integers(0, 5, 4), (4, 3))
function("index_copy", lambda x, s: x.index_copy(0, torch.tensor([3, 1]), s), (5, 3), (2, 3))
def _assign(x: Any, y: Any) -> Any:
    z = x.clone()
    z[:, -2] = y
    z[0] = 3.0
    z[1:, 1:3] *= 2
    return z
function("assign_slices", _assign, (3, 5), (3,))
def _assign_index(x: Any, i: Any) -> Any:
    z = x.clone()
    z[i] = 0.5
    return z
function("assign_two_apart", lambda x, i, j, v: torch.ops.aten.index_put(x, [i, None, j], v), (5, 2, 4), lambda: torch.tensor([0, 2, -1]), lambda: torch.tensor([1, 3, 0]), (3, 2))
function("assign_last", lambda x, i, j, v: torch.ops.aten.index_put(x, [None, i, j], v), (2, 5, 4), lambda: torch.tensor([0, 2, -1]), lambda: torch.tensor([1, 3, 0]), (2, 3))
function("assign_index", _assign_index, (5, 4), integers(-5, 0, 3))
function("masked_fill", lambda x, m: x.masked_fill(m, -1e9), (3, 4), booleans(3, 4))
function("masked_fill_infinity", lambda x, m: x.masked_fill(m, float("-inf")), (3, 4), booleans(4))
function("masked_fill_tensor", lambda x, m, v: x.masked_fill(m, v[0]), (3, 4), booleans(3, 4), (1,))
function("where", torch.where, booleans(3, 4), (3, 4), (3, 4))
function("where_scalar", lambda c, x: torch.where(c, x, 0.0), booleans(3, 1), (3, 4))
function("where_mixed", lambda c, x, y: torch.where(c, x, y), booleans(3, 4), (3, 4), integers(0, 5, 4))
function("where_integers", lambda c, x: torch.where(c, x, 1), booleans(3, 4), integers(0, 9, 3, 4))
function("tril_triu", lambda x: (x.tril(1), x.triu(-1)), (4, 5))
function("one_hot", lambda x: F.one_hot(x, 5), integers(0, 5, 3))

# Shapes
function("reshape", lambda x: x.reshape(2, -1, 2), (4, 6))
function("view_of_transpose", lambda x: x.transpose(0, 2).contiguous().view(5, -1), (3, 4, 5))
function("flatten", lambda x: x.flatten(1, -2), (2, 3, 4, 5))
function("unflatten", lambda x: x.unflatten(-1, (2, 3)), (4, 6))
function("squeeze", lambda x: (x.squeeze(), x.squeeze(1), x.squeeze(0), x.squeeze(-1)), (3, 1, 4, 1))
function("unsqueeze", lambda x: x.unsqueeze(-1).unsqueeze(0), (3, 4))
function("permute", lambda x: x.permute(2, 0, -2), (3, 4, 5))
function("movedim", lambda x: x.movedim(0, -1), (3, 4, 5))
function("expand", lambda x: x.expand(-1, 4, -1), (3, 1, 5))
function("expand_new", lambda x: x.expand(2, 3, 4), (4,))
function("repeat", lambda x: x.repeat(2, 1, 3), (3, 4))
function("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1), (3, 4))
function("tile", lambda x: x.tile((2, 2)), (2, 3, 4))
function("roll", lambda x: x.roll((1, -2), (0, 1)), (3, 5))
function("roll_flat", lambda x: x.roll(2), (3, 5))
function("flip", lambda x: x.flip(0, -1), (3, 4, 5))
function("rot90", lambda x: torch.rot90(x), (3, 4))
function("cat", lambda x, y: torch.cat([x, y, x], -1), (3, 4), (3, 2))
function("cat_mixed", lambda x, y: torch.cat([x, y]), (3, 4), integers(0, 5, 2, 4))
function("stack", lambda x, y: torch.stack([x, y], -1), (3, 4), (3, 4))
function("split", lambda x: x.split(3, 1), (2, 8))
function("split_sizes", lambda x: x.split([1, 4, 3], -1), (2, 8))
function("chunk", lambda x: x.chunk(3, 1), (2, 8))
function("tensor_split", lambda x: x.tensor_split(3, 1), (2, 8))
function("unbind", lambda x: x.unbind(-1), (2, 3))
function("unbind_one", lambda x: x.unbind(1), (2, 1, 3))
function("narrow", lambda x: x.narrow(1, 2, 3), (2, 8))
function("narrow_negative", lambda x: x.narrow(-1, -4, 3), (2, 8))
function("pad_constant", lambda x: F.pad(x, (1, 2, 0, 3), value=1.5), (2, 3, 4))
function("pad_negative", lambda x: F.pad(x, (-1, 2)), (2, 5))
function("pad_reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), (2, 3, 5))
function("pad_replicate", lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"), (1, 2, 4, 5))
function("pad_circular", lambda x: F.pad(x, (1, 2), mode="circular"), (2, 3, 5))
module("zero_pad2d", lambda: nn.ZeroPad2d((1, 0, 2, 1)), (1, 2, 3, 3))
function("unfold_tensor", lambda x: x.unfold(1, 3, 2), (2, 9))
module("unfold", lambda: nn.Unfold(2), (1, 2, 4, 4))
module("fold", lambda: nn.Fold((4, 4), 2), (1, 8, 9))
function("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (1, 8, 3, 3))
function("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (1, 2, 4, 6))
function("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (1, 4, 3, 3))
function("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (3,), (4,))
function("meshgrid_xy", lambda x, y: torch.meshgrid(x, y, indexing="xy"), (3,), (4,))
function("window_partition", lambda x: x.view(1, 2, 2, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 3), (1, 4, 4, 3))
function("as_strided", lambda x: x.as_strided((2, 3), (3, 1)), (2, 3))
function("diag", lambda x: torch.diag(x), (4,))
function("diag_embed", torch.diag_embed, (2, 3))

# Resampling
_x = (1, 2, 4, 5)
function("nearest_scale", lambda x: F.interpolate(x, scale_factor=2), _x)
function("nearest_fraction", lambda x: F.interpolate(x, scale_factor=1.7), _x)
function("nearest_size", lambda x: F.interpolate(x, size=(7, 3)), _x)
function("nearest_exact", lambda x: F.interpolate(x, size=(7, 3), mode="nearest-exact"), _x)
function("nearest_1d", lambda x: F.interpolate(x, scale_factor=2), (1, 2, 5))
function("nearest_3d", lambda x: F.interpolate(x, scale_factor=2), (1, 2, 2, 3, 2))
function("bicubic", lambda x: F.interpolate(x, size=(7, 8), mode="bicubic"), _x)
function("bicubic_corners", lambda x: F.interpolate(x, size=(7, 8), mode="bicubic", align_corners=True), _x)
function("bicubic_smaller", lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic"), (1, 2, 8, 8))
function("linear_1d_resize", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (1, 2, 5))
function("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (1, 2, 2, 3, 2))
function("area", lambda x: F.interpolate(x, size=(2, 2), mode="area"), _x)
module("upsample", lambda: nn.Upsample(scale_factor=(2, 3), mode="nearest"), _x)
function("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), _x, (1, 3, 3, 2))
function("grid_sample_nearest_border", lambda x, g: F.grid_sample(x, g, mode="nearest", padding_mode="border", align_corners=True), _x, (1, 3, 3, 2))
function("affine_grid", lambda t: F.affine_grid(t, (1, 2, 4, 5), align_corners=False), (1, 2, 3))

# Creation
function("arange", lambda x: x + torch.arange(4), (3, 4))
function("arange_float", lambda x: x + torch.arange(1, 3, 0.5), (4,))
function("arange_step", lambda x: x + torch.arange(8, 0, -2), (4,))
function("full_like", lambda x: (torch.full_like(x, 2), torch.ones_like(x), torch.zeros_like(x), torch.full((2,), 3)), (3, 4))
function("ones_like_dtype", lambda x: (torch.ones_like(x, dtype=torch.int64), torch.zeros_like(x, dtype=torch.bool), torch.full_like(x, 1.5, dtype=torch.float64)), (3,))
function("new_zeros", lambda x: (x.new_zeros(2, 3), x.new_ones(2, dtype=torch.int32), x.new_full((2,), 5.0)), (3,))
function("eye", lambda x: x + torch.eye(3), (3, 3))
function("linspace", lambda x: x + torch.linspace(0, 1, 5), (5,))
function("scalar_tensor", lambda x: x + torch.tensor(1.5), (3,))
function("positions", lambda x: torch.arange(x.shape[1]).expand(x.shape[0], -1) + x, integers(0, 5, 2, 4))
function("causal_mask", lambda x: x.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf")).softmax(-1), (2, 4, 4))
