"""Modules and inputs that peers.py and floors.py run; device and precision are the caller's."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Task = tuple[nn.Module, dict[str, Any]]


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embeddings, layers of GPT-2, and the head."""

    def __init__(self, layers: int = 12, width: int = 768, words: int = 50_257) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(at))))


class UNet(nn.Module):
    """Three widths down and up again, with skips."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(self.pair(i, o) for i, o in pairs)
        self.up = nn.ModuleList(self.pair(o + i, i) for i, o in reversed(pairs[1:]))
        self.last = nn.Conv2d(widths[0], 3, 1)

    def pair(self, i: int, o: int) -> nn.Module:
        steps = [nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU()]
        return nn.Sequential(*steps, nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for layer in self.down:
            x = layer(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.last(x)


def ids(batch: int = 8, length: int = 255) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.long)


def gpt2() -> Task:
    return GPT(), {"ids": ids(8, 1024)}


def example(name: str) -> Task:
    """What examples/models has."""
    sys.path.append(str(Path(__file__).parents[2] / "examples" / "models"))
    module, args = importlib.import_module(name).build()
    return module, dict(zip(inspect.signature(module.forward).parameters, args, strict=False))


def causal(kind: str, length: int = 255, past: int = 0, **sizes: Any) -> Task:
    """A language model, with positions and a mask: else its code reads values."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, use_cache=bool(past), **sizes)
    module = transformers.AutoModelForCausalLM.from_config(config)
    mask = torch.ones(1, 1, length, length + past, dtype=torch.bool)
    at = past + torch.arange(length)[None]
    kwargs = {"input_ids": ids(8, length), "attention_mask": mask, "position_ids": at}
    if past:
        kwargs["past_key_values"] = cache = transformers.DynamicCache(config=config)
        kept = torch.ones(8, config.num_key_value_heads, past, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(kept, kept, layer)
    return module, kwargs


LLAMA = {"hidden_size": 4096, "intermediate_size": 14_336, "num_key_value_heads": 8}


def llama(length: int = 255, past: int = 0) -> Task:
    """Llama 3.1 8B."""
    return causal("llama", length, past, vocab_size=128_256, **LLAMA)


def moe() -> Task:
    """A mixture as Mixtral's, narrow enough to run on a CPU."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    module, kwargs = causal("mixtral", num_hidden_layers=16, num_key_value_heads=4, **sizes)
    return module.to(torch.bfloat16), kwargs


def encoder() -> Task:
    layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    module = nn.TransformerEncoder(layer, 100, enable_nested_tensor=False)
    return module, {"src": torch.ones(8, 256, 512)}


def unet() -> Task:
    return UNet(), {"x": torch.ones(8, 3, 128, 128)}


def stack() -> Task:
    layers = (nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU()) for _ in range(256))
    return nn.Sequential(*layers), {"input": torch.ones(64, 512)}


TASKS: dict[str, tuple[Callable[[], Task], bool]] = {
    "GPT-2 (own module), training": (gpt2, True),
    "ResNet-50, training": (partial(example, "resnet"), True),
    "Llama 3.1 8B, prefill": (llama, False),
    "Llama 3.1 8B, decode": (partial(llama, 1, 255), False),
    "Llama 3.1 8B, training": (llama, True),
    "mixture of experts, 16 layers": (moe, False),
    "ViT-B/16": (partial(example, "vit"), False),
    "nn.TransformerEncoder, 100 layers": (encoder, False),
    "UNet": (unet, False),
    "LSTM": (partial(example, "lstm_tagger"), False),
    "256 layers of an own module, training": (stack, True),
}
"""Each with whether it has a backward pass."""
