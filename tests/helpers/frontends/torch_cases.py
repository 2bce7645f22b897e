# ruff: noqa: E501
# fmt: off
"""The table of the torch sweep: one tiny case for each operator and each way of using it that TVM could get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """``build`` makes a module or a function; ``inputs`` makes its arguments."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]
    tolerance: float | None = None


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Group(nn.Module):
    """Several modules, each on inputs of its own."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> Any:
        return [part(*arguments) for part, arguments in zip(self.parts, inputs, strict=True)]


CASES: list[Case] = []


def module(name: str, build: Callable[[], nn.Module], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32,
           tolerance: float | None = None) -> None:
    """A layer on normal random inputs of the given shapes."""
    CASES.append(
        Case(name, lambda: build().to(dtype), lambda: tuple(torch.randn(*s).to(dtype) for s in shapes), tolerance)
    )


def function(name: str, run: Callable[..., Any], *inputs: Any, tolerance: float | None = None) -> None:
    """A function; an input is a shape (normal random float32) or a function that makes the tensor."""
    def make() -> tuple[Any, ...]:
        return tuple(torch.randn(*i) if isinstance(i, tuple) else i() for i in inputs)
    CASES.append(Case(name, lambda: run, make, tolerance))


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(low, high, shape).to(dtype)


def nonzero_integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    return lambda: (torch.randint(1, high, shape) * (torch.randint(0, 2, shape) * 2 - 1)).to(dtype)


def positive(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(*shape) + 0.1


def unit(*shape: int) -> Callable[[], torch.Tensor]:
    """Uniform in (-0.95, 0.95)."""
    return lambda: torch.rand(*shape) * 1.9 - 0.95


def booleans(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(*shape) > 0.5


def typed(dtype: torch.dtype, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: (torch.randn(*shape) * 3).to(dtype)


# Convolutions
module("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9))
module("conv1d_groups_dilation", lambda: nn.Conv1d(4, 8, 3, dilation=2, groups=2), (2, 4, 9))
module("conv1d_same", lambda: nn.Conv1d(3, 5, 4, padding="same"), (2, 3, 9))
module("conv1d_unbatched", lambda: nn.Conv1d(3, 5, 3), (3, 9))
module("conv2d", lambda: nn.Conv2d(3, 8, 3, stride=2, padding=1), (2, 3, 9, 9))
module("conv2d_no_bias", lambda: nn.Conv2d(3, 8, (1, 3), padding=(0, 1), bias=False), (2, 3, 9, 8))
module("conv2d_groups", lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 9, 9))
module("conv2d_depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 9, 9))
module("conv2d_depthwise_multiplier", lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 9, 9))
module("conv2d_dilation", lambda: nn.Conv2d(3, 8, 3, dilation=(2, 1), padding=2), (2, 3, 9, 9))
module("conv2d_same", lambda: nn.Conv2d(3, 8, 4, padding="same"), (2, 3, 9, 9))
module("conv2d_valid", lambda: nn.Conv2d(3, 8, 4, padding="valid"), (2, 3, 9, 9))
module("conv2d_reflect", lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), (2, 3, 9, 9))
module("conv2d_replicate", lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="replicate"), (2, 3, 9, 9))
module("conv2d_circular", lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), (2, 3, 9, 9))
module("conv2d_unbatched", lambda: nn.Conv2d(3, 5, 3), (3, 9, 9))
module("conv3d", lambda: nn.Conv3d(2, 4, 3, padding=1, stride=(1, 2, 2)), (1, 2, 5, 6, 6))
module("conv3d_groups", lambda: nn.Conv3d(4, 4, 2, groups=2), (1, 4, 4, 4, 4))
module("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 7))
module("conv_transpose1d_groups", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (2, 4, 7))
module("conv_transpose1d_dilation", lambda: nn.ConvTranspose1d(4, 6, 3, dilation=2), (2, 4, 7))
module("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (1, 4, 5, 5))
module("conv_transpose2d_asymmetric", lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), bias=False), (1, 4, 5, 6))
module("conv_transpose2d_groups", lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 5, 5))
module("conv_transpose2d_dilation", lambda: nn.ConvTranspose2d(4, 6, 3, dilation=2, padding=1), (1, 4, 5, 5))
module("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (1, 2, 3, 3, 3))
function("conv2d_weight_input", lambda x, w: F.conv2d(x, w, padding=1), (1, 3, 6, 6), (4, 3, 3, 3))

# Linear algebra
module("linear_2d", lambda: nn.Linear(5, 7), (3, 5))
module("linear_1d", lambda: nn.Linear(5, 7), (5,))
module("linear_3d", lambda: nn.Linear(5, 7, bias=False), (2, 3, 5))
module("linear_4d", lambda: nn.Linear(5, 7), (2, 3, 2, 5))
function("mm", torch.mm, (3, 4), (4, 5))
function("bmm", torch.bmm, (2, 3, 4), (2, 4, 5))
function("baddbmm", lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2), (2, 3, 5), (2, 3, 4), (2, 4, 5))
function("addmm", lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), (3, 5), (3, 4), (4, 5))
function("addmv", torch.addmv, (3,), (3, 4), (4,))
function("matmul_1d_1d", torch.matmul, (4,), (4,))
function("matmul_1d_2d", torch.matmul, (4,), (4, 5))
function("matmul_2d_1d", torch.matmul, (3, 4), (4,))
function("matmul_3d_1d", torch.matmul, (2, 3, 4), (4,))
function("matmul_1d_3d", torch.matmul, (4,), (2, 4, 5))
function("matmul_4d_3d", torch.matmul, (2, 3, 4, 5), (3, 5, 6))
function("matmul_broadcast", torch.matmul, (2, 1, 4, 5), (3, 5, 6))
function("matmul_integers", torch.matmul, integers(-5, 5, 3, 4), integers(-5, 5, 4, 5))
function("dot", torch.dot, (4,), (4,))
function("mv", torch.mv, (3, 4), (4,))
function("outer", torch.outer, (3,), (4,))
function("einsum_batched", lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), (2, 3, 4, 5), (2, 3, 6, 5))
function("einsum_diagonal", lambda a: torch.einsum("ii->i", a), (4, 4))
function("einsum_ellipsis", lambda a, b: torch.einsum("...ij,jk->...ik", a, b), (2, 3, 4, 5), (5, 6))
function("einsum_three", lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), (2, 3), (3, 4), (4, 5))
function("tensordot", lambda a, b: torch.tensordot(a, b, dims=2), (2, 3, 4), (3, 4, 5))
function("diagonal", lambda a: torch.diagonal(a, offset=1, dim1=-2, dim2=-1), (2, 4, 5))
function("kron", torch.kron, (2, 3), (2, 2))
function("cross", lambda a, b: torch.linalg.cross(a, b), (4, 3), (4, 3))

# Norms
def _trained(norm: Any) -> Any:
    for tensor in (norm.weight, norm.bias, getattr(norm, "running_mean", None)):
        if tensor is not None:
            nn.init.normal_(tensor)
    if getattr(norm, "running_var", None) is not None:
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm


module("batch_norm1d", lambda: _trained(nn.BatchNorm1d(4)), (5, 4))
module("batch_norm1d_3d", lambda: _trained(nn.BatchNorm1d(4)), (5, 4, 6))
module("batch_norm2d", lambda: _trained(nn.BatchNorm2d(4, eps=1e-3)), (2, 4, 5, 5))
module("batch_norm2d_not_affine", lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 5, 5))
module("batch_norm2d_no_statistics", lambda: nn.BatchNorm2d(4, track_running_stats=False), (2, 4, 5, 5))
module("batch_norm3d", lambda: _trained(nn.BatchNorm3d(4)), (2, 4, 3, 3, 3))
module("layer_norm", lambda: _trained(nn.LayerNorm(6)), (2, 3, 6))
module("layer_norm_two_axes", lambda: _trained(nn.LayerNorm((3, 6), eps=1e-3)), (2, 3, 6))
module("layer_norm_not_affine", lambda: nn.LayerNorm(6, elementwise_affine=False), (2, 3, 6))
module("layer_norm_no_bias", lambda: nn.LayerNorm(6, bias=False), (2, 3, 6))
module("group_norm", lambda: _trained(nn.GroupNorm(2, 6)), (2, 6, 4, 4))
module("group_norm_not_affine", lambda: nn.GroupNorm(3, 6, affine=False), (2, 6, 5))
module("group_norm_2d", lambda: _trained(nn.GroupNorm(3, 6)), (2, 6))
module("instance_norm1d", lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 7))
module("instance_norm2d", lambda: nn.InstanceNorm2d(4), (2, 4, 5, 5))
module("instance_norm2d_affine", lambda: _trained(nn.InstanceNorm2d(4, affine=True)), (2, 4, 5, 5))
module("instance_norm2d_tracked", lambda: _trained(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), (2, 4, 5, 5))
module("rms_norm", lambda: nn.RMSNorm(6), (2, 3, 6))
module("rms_norm_eps", lambda: nn.RMSNorm(6, eps=1e-3, elementwise_affine=False), (2, 3, 6))
module("local_response_norm", lambda: nn.LocalResponseNorm(3), (2, 6, 4, 4))
function("normalize", lambda x: F.normalize(x, dim=-1), (3, 5))
function("normalize_l1", lambda x: F.normalize(x, p=1.0, dim=0), (3, 5))

# Activations
for _layer in (
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.LeakyReLU(0.3), nn.ELU(), nn.ELU(0.7), nn.SELU(), nn.CELU(), nn.CELU(2.0),
    nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(), nn.Hardtanh(),
    nn.Hardtanh(-0.5, 2.0), nn.Hardsigmoid(), nn.Hardswish(), nn.Hardshrink(0.4), nn.Softshrink(0.3), nn.Tanhshrink(),
    nn.Softplus(), nn.Softplus(2.0, 3.0), nn.Softsign(), nn.Threshold(0.1, 20.0), nn.GLU(), nn.Softmax(dim=1),
    nn.Softmin(dim=-1), nn.LogSoftmax(dim=0), nn.Identity(), nn.Dropout(0.5), nn.AlphaDropout(0.5),
):
    module(f"activation_{_layer}".replace(" ", ""), lambda layer=_layer: layer, (3, 5, 4))
module("activation_PReLU", lambda: nn.PReLU(), (3, 5, 4))
module("activation_PReLU_channels", lambda: nn.PReLU(5, init=0.1), (3, 5, 4))
module("softmax2d", nn.Softmax2d, (2, 3, 4, 4))
function("relu_in_place", lambda x: F.relu_(x + 1), (3, 4))
function("clone_add_in_place", lambda x: x.clone().add_(1).mul_(2), (3, 4))

# Pools
module("max_pool1d", lambda: nn.MaxPool1d(3, 2, 1), (2, 3, 9))
module("max_pool2d", lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 9, 9))
module("max_pool2d_ceil", lambda: nn.MaxPool2d(2, 2, ceil_mode=True), (2, 3, 7, 7))
module("max_pool2d_ceil_padding", lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), (2, 3, 8, 8))
module("max_pool2d_dilation", lambda: nn.MaxPool2d(2, 1, dilation=2), (2, 3, 7, 7))
module("max_pool2d_unbatched", lambda: nn.MaxPool2d(2), (3, 6, 6))
module("max_pool3d", lambda: nn.MaxPool3d(2), (1, 2, 4, 4, 4))
module("avg_pool1d", lambda: nn.AvgPool1d(3, 2, 1), (2, 3, 9))
module("avg_pool2d", lambda: nn.AvgPool2d(3, 2, 1), (2, 3, 9, 9))
module("avg_pool2d_exclude", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (2, 3, 9, 9))
module("avg_pool2d_ceil", lambda: nn.AvgPool2d(2, 2, ceil_mode=True), (2, 3, 7, 7))
module("avg_pool2d_ceil_padding", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), (2, 3, 8, 8))
module("avg_pool2d_ceil_exclude", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 3, 8, 8))
module("avg_pool2d_divisor", lambda: nn.AvgPool2d(2, divisor_override=3), (2, 3, 6, 6))
module("avg_pool3d", lambda: nn.AvgPool3d(2, 1, 1), (1, 2, 4, 4, 4))
module("adaptive_avg_pool1d", lambda: nn.AdaptiveAvgPool1d(3), (2, 3, 8))
module("adaptive_avg_pool2d", lambda: nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 7, 8))
module("adaptive_avg_pool2d_1", lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 7, 8))
module("adaptive_avg_pool2d_none", lambda: nn.AdaptiveAvgPool2d((None, 2)), (2, 3, 7, 8))
module("adaptive_avg_pool2d_larger", lambda: nn.AdaptiveAvgPool2d(7), (1, 2, 3, 3))
module("adaptive_avg_pool3d", lambda: nn.AdaptiveAvgPool3d(2), (1, 2, 5, 4, 3))
module("adaptive_max_pool1d", lambda: nn.AdaptiveMaxPool1d(3), (2, 3, 8))
module("adaptive_max_pool2d", lambda: nn.AdaptiveMaxPool2d(3), (2, 3, 7, 8))
module("adaptive_max_pool2d_1", lambda: nn.AdaptiveMaxPool2d(1), (2, 3, 7, 8))
module("lp_pool2d", lambda: nn.LPPool2d(2, 2), (2, 3, 6, 6))

# Embeddings, recurrent layers, attention
CASES.append(Case("embedding", lambda: nn.Embedding(10, 4), lambda: (torch.randint(0, 10, (2, 3)),)))
CASES.append(Case("embedding_1d", lambda: nn.Embedding(10, 4), lambda: (torch.randint(0, 10, (3,)),)))
CASES.append(Case("embedding_scalar", lambda: nn.Embedding(10, 4), lambda: (torch.tensor(3),)))
CASES.append(Case("embedding_int32", lambda: nn.Embedding(10, 4), lambda: (torch.randint(0, 10, (2, 3)).int(),)))
module("lstm", lambda: nn.LSTM(4, 5), (3, 2, 4))
module("lstm_two_layers", lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True), (2, 3, 4))
module("lstm_projection", lambda: nn.LSTM(4, 5, proj_size=3, bias=False), (3, 2, 4))
module("gru", lambda: nn.GRU(4, 5, num_layers=2, batch_first=True), (2, 3, 4))
module("gru_bidirectional", lambda: nn.GRU(4, 5, bidirectional=True), (3, 2, 4))
module("rnn_tanh", lambda: nn.RNN(4, 5, num_layers=2), (3, 2, 4))
module("rnn_relu", lambda: nn.RNN(4, 5, nonlinearity="relu"), (3, 2, 4))
module("lstm_cell", lambda: nn.LSTMCell(4, 5), (2, 4))
module("gru_cell", lambda: nn.GRUCell(4, 5), (2, 4))
_attention = F.scaled_dot_product_attention
function("attention", _attention, (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7))
function("attention_3d", _attention, (2, 4, 5), (2, 6, 5), (2, 6, 5))
function("attention_2d", _attention, (4, 5), (6, 5), (6, 5))
function("attention_scale", lambda q, k, v: _attention(q, k, v, scale=0.1), (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5))
function("attention_causal", lambda q, k, v: _attention(q, k, v, is_causal=True), (2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5))
function("attention_causal_longer", lambda q, k, v: _attention(q, k, v, is_causal=True), (1, 1, 4, 5), (1, 1, 6, 5), (1, 1, 6, 5))
function("attention_mask", lambda q, k, v, m: _attention(q, k, v, m), (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5), (4, 6))
function("attention_mask_bool", lambda q, k, v: _attention(q, k, v, torch.ones(4, 6).tril(1).bool()), (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5))
function("attention_mask_batch", lambda q, k, v, m: _attention(q, k, v, m), (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5), (2, 1, 4, 6))
function("attention_gqa", lambda q, k, v: _attention(q, k, v, enable_gqa=True), (2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 5))
function("attention_half", _attention, typed(torch.float16, 1, 2, 4, 8), typed(torch.float16, 1, 2, 4, 8), typed(torch.float16, 1, 2, 4, 8))
module("multihead_attention", lambda: nn.MultiheadAttention(8, 2, batch_first=True), (2, 3, 8), (2, 5, 8), (2, 5, 8))
class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]
module("multihead_self_attention", _SelfAttention, (3, 2, 8))
module("transformer_encoder_layer", lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8))
module("transformer_encoder_layer_gelu", lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=True), (3, 2, 8))
module("transformer_decoder_layer", lambda: nn.TransformerDecoderLayer(8, 2, 16), (3, 2, 8), (4, 2, 8))

# Indexing
function("select_negative", lambda x: x[:, -1], (3, 4, 5))
function("select_negative_2", lambda x: x.select(-1, -2), (3, 4))
function("select_positive", lambda x: x[1], (3, 4))
function("slice_step", lambda x: x[:, 1:7:2], (3, 9))
function("slice_negative", lambda x: x[:, -3:-1], (3, 9))
function("slice_beyond", lambda x: x[:, 2:100], (3, 9))
function("slice_empty_start", lambda x: x[-100:2], (3, 9))
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

# Reductions
function("mean", lambda x: (x.mean(), x.mean(-1), x.mean((0, 2), keepdim=True)), (2, 3, 4))
function("sum", lambda x: (x.sum(), x.sum(-2, keepdim=True), x.sum((0, -1))), (2, 3, 4))
function("sum_dtypes", lambda x, y, z: (x.sum(), y.sum(0), z.sum(dtype=torch.float64)), integers(0, 9, 3, dtype=torch.int32), booleans(3, 4), (3,))
function("amax_amin", lambda x: (x.amax(-1), x.amin((0, 1), keepdim=True)), (2, 3, 4))
function("max_min", lambda x: (x.max(), x.min()), (2, 3))
function("max_dim", lambda x: x.max(-1), (2, 5))
function("min_dim", lambda x: x.min(0, keepdim=True), (4, 5))
function("var", lambda x: (x.var(-1), x.var(0, unbiased=False), x.var((0, 1), keepdim=True), x.var()), (3, 4))
function("std", lambda x: (x.std(-1), x.std(0, unbiased=False), x.std(correction=2)), (3, 4))
function("var_mean", lambda x: torch.var_mean(x, -1), (3, 4))
function("argmax", lambda x: (x.argmax(), x.argmax(-1), x.argmin(0, keepdim=True)), (3, 4))
function("prod", lambda x: (x.prod(), x.prod(-1), x.prod(0, keepdim=True)), (3, 4))
function("prod_integers", lambda x: x.prod(1), integers(-3, 4, 3, 4, dtype=torch.int32))
function("cumsum", lambda x: (x.cumsum(0), x.cumsum(-1)), (3, 4))
function("cumsum_integers", lambda x: x.cumsum(0), integers(0, 9, 5, dtype=torch.int32))
function("cumsum_bool", lambda x: x.cumsum(0), booleans(5))
function("cumprod", lambda x: x.cumprod(1), (3, 4))
function("topk", lambda x: x.topk(3), (2, 7))
function("topk_smallest", lambda x: x.topk(2, dim=0, largest=False), (7, 2))
function("sort", lambda x: x.sort(), (2, 7))
function("sort_descending", lambda x: x.sort(dim=0, descending=True), (7, 2))
function("argsort", lambda x: x.argsort(-1), (2, 7))
function("norm", lambda x: (x.norm(), x.norm(dim=-1), x.norm(p=1, dim=0), torch.linalg.vector_norm(x, ord=3.0, dim=1, keepdim=True)), (3, 4))
function("norm_infinite", lambda x: (torch.linalg.vector_norm(x, float("inf")), torch.linalg.vector_norm(x, float("-inf"), dim=0)), (3, 4))
function("norm_zero", lambda x: torch.linalg.vector_norm(x.clamp_min(0), 0, dim=1), (3, 4))
function("logsumexp", lambda x: x.logsumexp(-1, keepdim=True), (3, 4))
function("any_all", lambda x: (x.any(), x.any(-1), x.all(0), x.all()), booleans(3, 4))
function("any_float", lambda x: (x.clamp_min(0).any(1), x.clamp_min(0).all(1)), (3, 4))
function("median", lambda x: x.median(-1), (3, 5))
function("median_even", lambda x: x.median(-1).values, (3, 4))
function("median_all", lambda x: x.median(), (3, 4))
function("count_nonzero", lambda x: torch.count_nonzero(x.clamp_min(0), 1), (3, 4))
function("aminmax", lambda x: tuple(torch.aminmax(x)), (3, 4))

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

# Arithmetic
function("add_alpha", lambda x, y: torch.add(x, y, alpha=2), (3, 4), (4,))
function("sub_alpha", lambda x, y: torch.sub(x, y, alpha=0.5), (3, 4), (3, 4))
function("rsub", lambda x: (1 - x, torch.rsub(x, 2, alpha=3)), (3, 4))
function("rsub_integers", lambda x: (1 - x, 1.5 - x), integers(0, 9, 3))
function("integer_plus_float", lambda x: (x + 0.5, x * 0.5, x - 1.5, 0.5 / x), integers(1, 9, 3))
function("integer_plus_tensor", lambda x, y: (x + y, x * y), integers(1, 9, 3, 4), (4,))
function("int32_int64", lambda x, y: x + y, integers(1, 9, 3, dtype=torch.int32), integers(1, 9, 3))
function("int32_scalar_tensor", lambda x: x + torch.tensor(2), integers(1, 9, 3, dtype=torch.int32))
function("half_scalar_tensor", lambda x: x * torch.tensor(2.5), typed(torch.float16, 3, 4))
function("float_double", lambda x, y: x + y, (3,), typed(torch.float64, 3))
function("bool_arithmetic", lambda x, y: (x + 1, x * 2.5, y + x, y * x), booleans(3, 4), (3, 4))
function("bool_bool", lambda x, y: (x & y, x | y, x ^ y, ~x, x * y, x + y), booleans(3, 4), booleans(3, 4))
function("divide_integers", lambda x, y: (x / y, x / 2), integers(-9, 9, 5), nonzero_integers(4, 5))
function("divide_floor", lambda x, y: (torch.div(x, y, rounding_mode="floor"), x // 2.0), (5,), (5,))
function("divide_trunc", lambda x, y: (torch.div(x, y, rounding_mode="trunc"), torch.div(x, 0.7, rounding_mode="trunc")), (5,), (5,))
function("divide_integers_floor", lambda x, y: (x // y, x // 3, x // -3), integers(-9, 9, 12), nonzero_integers(4, 12))
function("divide_integers_trunc", lambda x, y: (torch.div(x, y, rounding_mode="trunc"), torch.div(x, 3, rounding_mode="trunc")), integers(-9, 9, 12), nonzero_integers(4, 12))
function("remainder", lambda x, y: (x % y, x % 0.7, x % -0.7), (9,), (9,))
function("remainder_integers", lambda x, y: (x % y, x % 3, x % -3), integers(-9, 9, 12), nonzero_integers(4, 12))
function("fmod", lambda x, y: (torch.fmod(x, y), torch.fmod(x, 0.7)), (9,), (9,))
function("fmod_integers", lambda x, y: torch.fmod(x, y), integers(-9, 9, 12), nonzero_integers(4, 12))
function("pow", lambda x: (x**2, x**0.5, x**-1, 2**x, x**3.0), positive(3, 4))
function("pow_negative_base", lambda x: (x**2, x**3), (3, 4))
function("pow_tensor", torch.pow, positive(3, 4), (3, 4))
function("pow_integers", lambda x: (x**2, x**0, x**1, x**3), integers(-4, 5, 5))
function("pow_integer_base", lambda x: 2**x, integers(0, 5, 5))
function("pow_integer_float", lambda x: (x**2.0, x**0.5), integers(1, 5, 5))
function("square_root", lambda x: (x.sqrt(), x.rsqrt(), x.reciprocal(), x.square()), positive(3, 4))
function("square_root_integers", lambda x: (x.sqrt(), x.rsqrt(), x.reciprocal(), x.exp(), x.sin()), integers(1, 9, 4))
function("logarithms", lambda x: (x.log(), x.log2(), x.log10(), x.log1p()), positive(3, 4))
function("log1p_small", lambda x: (torch.log1p(x * 1e-6) * 1e6, torch.expm1(x * 1e-6) * 1e6), positive(3, 4))
function("exponentials", lambda x: (x.exp(), x.exp2(), x.expm1()), (3, 4))
function("trigonometry", lambda x: (x.sin(), x.cos(), x.tan(), x.asin(), x.acos(), x.atan()), unit(3, 4))
function("hyperbolic", lambda x: (x.sinh(), x.cosh(), x.tanh(), x.asinh(), x.atanh(), (x + 2.5).acosh()), unit(3, 4))
function("atan2", torch.atan2, (9,), (9,))
function("hypot", torch.hypot, (9,), (9,))
function("erf", lambda x: (x.erf(), torch.erfc(x), torch.special.expit(x)), (3, 4))
function("logit", lambda x: torch.logit(x.abs().clamp(0.1, 0.9)), unit(3, 4))
function("sign_abs", lambda x: (x.sign(), x.abs(), -x, torch.sgn(x)), (3, 4))
function("rounding", lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.frac()), lambda: torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.3, -0.7, 3.7]))
function("round_decimals", lambda x: (torch.round(x, decimals=2), torch.round(x * 100, decimals=-1)), (9,))
function("rounding_integers", lambda x: (x.round(), x.floor(), x.sign(), x.abs()), integers(-5, 5, 5))
function("comparison", lambda x, y: (x > y, x >= y, x < y, x <= y, x == y, x != y), integers(0, 3, 9), integers(0, 3, 9))
function("comparison_scalar", lambda x: (x > 1.5, x == 2, x != 2, x <= 1, x < 2), integers(0, 4, 9))
function("comparison_mixed", lambda x, y: (x > y, x == y), integers(0, 3, 9), (9,))
function("logical", lambda x, y: (torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_xor(x, y), torch.logical_not(x)), integers(0, 3, 9), integers(0, 3, 9))
function("bitwise", lambda x, y: (x & y, x | y, x ^ y, ~x, x & 3), integers(-8, 8, 9), integers(-8, 8, 9))
function("shifts", lambda x: (x << 2, x >> 1), integers(-8, 8, 9))
function("clamp", lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0.1), x.clamp(max=0.1), x.clamp_min(0.2), x.clamp_max(0.2)), (3, 4))
function("clamp_integers", lambda x: (x.clamp(-2, 2), x.clamp(min=0), x.clamp(max=1)), integers(-5, 5, 9))
function("clamp_integers_float", lambda x: x.clamp(-1.5, 2.5), integers(-5, 5, 9))
function("clamp_tensor", lambda x, y: (x.clamp(min=y), torch.clamp(x, max=y)), (3, 4), (4,))
function("maximum_minimum", lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), torch.max(x, y)), (3, 4), (4,))
function("maximum_mixed", lambda x, y: torch.maximum(x, y), (3, 4), integers(-2, 2, 4))
function("lerp", lambda x, y: (torch.lerp(x, y, 0.3), torch.lerp(x, y, y)), (3, 4), (3, 4))
function("addcmul", lambda x, y: (torch.addcmul(x, x, y, value=0.5), torch.addcdiv(x, x, y.abs() + 1, value=2)), (3, 4), (3, 4))
function("casts", lambda x: (x.int(), x.long(), x.half().float(), x.double(), x.bool(), x.to(torch.int8)), lambda: torch.tensor([-2.7, -0.5, 0.0, 0.5, 2.7]))
function("casts_back", lambda x, y: (x.float(), y.float(), y.long(), x.bool(), x.to(torch.float16)), integers(-3, 3, 5), booleans(5))
function("is_special", lambda x: (x.isnan(), x.isinf(), x.isfinite()), lambda: torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]))
function("nan_to_num", lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0), lambda: torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]))
function("logaddexp", torch.logaddexp, (3, 4), (3, 4))
function("softmax_dtype", lambda x: F.softmax(x, -1, dtype=torch.float32), typed(torch.float16, 3, 4))
function("bucketize", lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), (5,))
function("isin", lambda x: torch.isin(x, torch.tensor([1, 3])), integers(0, 5, 6))
function("copysign", torch.copysign, (5,), (5,))
function("cross_entropy", lambda x, t: F.cross_entropy(x, t), (3, 5), integers(0, 5, 3))
function("mse", F.mse_loss, (3, 5), (3, 5))
function("cosine_similarity", F.cosine_similarity, (3, 5), (3, 5))
function("pairwise_distance", F.pairwise_distance, (3, 5), (3, 5))

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

# Half precision
for _dtype in (torch.float16, torch.bfloat16):
    _suffix = str(_dtype).removeprefix("torch.")
    module(f"conv1d_{_suffix}", lambda: nn.Conv1d(3, 4, 3), (1, 3, 8), dtype=_dtype)
    module(f"conv2d_{_suffix}", lambda: nn.Conv2d(3, 4, 3, padding=1), (1, 3, 6, 6), dtype=_dtype)
    module(f"conv_transpose2d_{_suffix}", lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), (1, 3, 4, 4), dtype=_dtype)
    module(f"linear_{_suffix}", lambda: nn.Linear(6, 5), (2, 6), dtype=_dtype)
    module(f"layer_norm_{_suffix}", lambda: nn.LayerNorm(6), (2, 6), dtype=_dtype)
    module(f"rms_norm_{_suffix}", lambda: nn.RMSNorm(6), (2, 6), dtype=_dtype)
    module(f"batch_norm_{_suffix}", lambda: _trained(nn.BatchNorm2d(3)), (2, 3, 4, 4), dtype=_dtype)
    module(f"group_norm_{_suffix}", lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3), dtype=_dtype)
    module(f"gelu_{_suffix}", nn.GELU, (3, 4), dtype=_dtype)
    module(f"silu_{_suffix}", nn.SiLU, (3, 4), dtype=_dtype)
    module(f"softmax_{_suffix}", lambda: nn.Softmax(-1), (3, 4), dtype=_dtype)
    module(f"max_pool_{_suffix}", lambda: nn.MaxPool2d(2), (1, 2, 4, 4), dtype=_dtype)
    module(f"avg_pool_{_suffix}", lambda: nn.AdaptiveAvgPool2d(1), (1, 2, 4, 4), dtype=_dtype)
    function(f"matmul_{_suffix}", torch.matmul, typed(_dtype, 2, 3, 4), typed(_dtype, 4, 5))
    function(f"arithmetic_{_suffix}", lambda x, y: (x * 0.1 + y, x / 3, x.mean(-1), x.sum(0), x > 0), typed(_dtype, 3, 4), typed(_dtype, 4))
module("conv2d_float64", lambda: nn.Conv2d(3, 4, 3, padding=1), (1, 3, 6, 6), dtype=torch.float64)
module("linear_float64", lambda: nn.Linear(6, 5), (2, 6), dtype=torch.float64)
