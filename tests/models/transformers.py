"""ViTs, BERTs and GPT-2s as plain torch modules, of any size, in evaluation mode."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.conditioning import conditioned


class Attention(nn.Module):
    """Self-attention with torch's scaled_dot_product_attention; [batch, tokens, width] in and out."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU(approximate=approximate)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class PreNormBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, causal: bool = False, approximate: str = "none") -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden, approximate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Input float32[batch, 3, size, size], output float32[batch, classes] (Dosovitskiy et al., 2021)."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[PreNormBlock(width, heads, 4 * width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(
    size: int = 16, patch: int = 4, width: int = 32, depth: int = 2, heads: int = 4, classes: int = 10, seed: int = 0
) -> nn.Module:
    return conditioned(lambda: VisionTransformer(size, patch, width, depth, heads, classes), seed)


def vit_b16(seed: int = 0, pixels: int = 224) -> nn.Module:
    """Input float32[batch, 3, pixels, pixels], a multiple of 16."""
    return vit(pixels, 16, 768, 12, 12, 1000, seed)


class PostNormBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.mlp = MLP(width, hidden)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.output_norm(x + self.mlp(x))


class Bert(nn.Module):
    """Inputs int64[batch, tokens] and a 0/1 mask int64[batch, tokens]; outputs the sequence and the pooled token."""

    def __init__(self, vocabulary: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList([PostNormBlock(width, heads, 4 * width) for _ in range(depth)])
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.word_embeddings(tokens) + self.position_embeddings(positions)))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return {"sequence": x, "pooled": torch.tanh(self.pooler(x[:, 0]))}


def bert(
    vocabulary: int = 50, positions: int = 16, width: int = 32, depth: int = 2, heads: int = 4, seed: int = 0
) -> nn.Module:
    return conditioned(lambda: Bert(vocabulary, positions, width, depth, heads), seed)


def bert_base(seed: int = 0) -> nn.Module:
    """Inputs int64[batch, tokens] twice, at most 512 tokens."""
    return bert(30522, 512, 768, 12, 12, seed)


class GPT2(nn.Module):
    """Input int64[batch, tokens], output logits float32[batch, tokens, vocabulary]; the head has its own weight."""

    def __init__(self, vocabulary: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList(
            [PreNormBlock(width, heads, 4 * width, causal=True, approximate="tanh") for _ in range(depth)]
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def gpt2(
    vocabulary: int = 50, positions: int = 16, width: int = 32, depth: int = 2, heads: int = 4, seed: int = 0
) -> nn.Module:
    return conditioned(lambda: GPT2(vocabulary, positions, width, depth, heads), seed)


def gpt2_small(seed: int = 0) -> nn.Module:
    """Input int64[batch, tokens], at most 1024 tokens."""
    return gpt2(50257, 1024, 768, 12, 12, seed)
