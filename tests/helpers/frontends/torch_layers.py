# ruff: noqa: E501
# fmt: off
"""Cases of the torch sweep: the layers of networks."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.frontends.torch_case import Case, Cases, typed

CASES = Cases()
module, function = CASES.module, CASES.function

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
for _padding in (0, 1, 3):
    module(f"conv_transpose2d_longer_by_stride_{_padding}", lambda padding=_padding: nn.ConvTranspose2d(4, 6, 3, 2, padding, 2, dilation=3), (1, 4, 5, 6))
module("conv_transpose1d_longer_by_stride", lambda: nn.ConvTranspose1d(4, 6, 2, dilation=3, output_padding=2), (2, 4, 7))
module("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (1, 2, 3, 3, 3))
function("conv2d_weight_input", lambda x, w: F.conv2d(x, w, padding=1), (1, 3, 6, 6), (4, 3, 3, 3))

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
function("max_pool1d_ceil_no_stride", lambda x: F.max_pool1d(x, 3, ceil_mode=True), (2, 3, 7))
function("max_pool2d_ceil_no_stride", lambda x: F.max_pool2d(x, 2, padding=1, ceil_mode=True), (2, 3, 7, 8))
function("max_pool3d_ceil_no_stride", lambda x: F.max_pool3d(x, (3, 2, 2), ceil_mode=True), (2, 4, 5, 5))
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
