"""The models whose groups are compared: a few layers at real widths, and small ones written here.

Some come from diffusers, which has to be installed for them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _language(family: str, head: str = "ForCausalLM", **settings: Any) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{family}Config")(**settings)
        with torch.device("meta"):
            model = getattr(transformers, family + head)._from_config(config, dtype=torch.bfloat16)
        tokens = {"input_ids": torch.arange(512).reshape(4, 128)}  # as many rows as tokens
        return model, (), tokens if head == "Model" else {**tokens, "use_cache": False}

    return build


def _images(family: str, **settings: Any) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{family}Config")(**settings)
        with torch.device("meta"):
            model = getattr(transformers, f"{family}Model")._from_config(config)
            return model.eval(), (torch.empty(8, 3, 224, 224),), {}

    return build


def _example(file: str, attribute: str = "build") -> Callable[[], Case]:
    def build() -> Case:
        spec = importlib.util.spec_from_file_location(file, EXAMPLES / f"{file}.py")
        if spec is None or spec.loader is None:
            raise ImportError(file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with torch.device("meta"):
            model, inputs = getattr(module, attribute)()
        return (model, (), inputs) if isinstance(inputs, dict) else (model, tuple(inputs), {})

    return build


class DiffusionBlock(nn.Module):
    """A level of a UNet: time embedding, residual blocks, attention, down, up and skip."""

    def __init__(self, width: int = 320, time: int = 1280) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.first = Residual(width, width, time)
        self.attention = Attention(width, 8)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = Residual(width, 2 * width, time)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = Residual(2 * width, width, time)
        self.norm = nn.GroupNorm(32, width)
        self.leave = nn.Conv2d(width, 4, 3, padding=1)
        self.width = width

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-9.21 * torch.arange(half, device=x.device) / half)
        angles = steps[:, None].float() * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype))
        skip = self.attention(self.first(self.enter(x), time))
        y = self.middle(self.down(skip), time)
        y = self.up(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        y = self.last(torch.cat([y, skip], dim=1), time)
        return self.leave(F.silu(self.norm(y)))


class Residual(nn.Module):
    """Two normalised convolutions, the time embedding between them."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, width), nn.GroupNorm(32, out)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention of pixels, and a gated feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.gate, self.back = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, width, *image = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(y)).chunk(3, dim=-1)
        )
        y = y + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        value, gate = self.gate(self.norm2(y)).chunk(2, dim=-1)
        y = y + self.back(value * F.gelu(gate))
        return x + y.transpose(1, 2).reshape(batch, width, *image)


class TransformerBlock(nn.Module):
    """A layer of a diffusion transformer: norms shifted and scaled by the time, gates, an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        parts = self.modulation(F.silu(time)).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(y).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(y)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.back(F.gelu(self.up(y), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    """Patches of an image, layers, and the patches of the noise."""

    def __init__(self, width: int = 1152, heads: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.leave = nn.Linear(width, 2 * 2 * 8)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        rates = torch.exp(-9.21 * torch.arange(128, device=x.device) / 128)
        angles = steps[:, None].float() * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype))
        y = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            y = layer(y, time)
        return self.leave(self.norm(y))


class ImageDecoder(nn.Module):
    """The last two levels of a decoder from latents to an image."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.first, self.last = PlainResidual(width, width), PlainResidual(width, width // 2)
        self.up = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(32, width // 2)
        self.leave = nn.Conv2d(width // 2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.enter(x))
        y = self.last(self.up(F.interpolate(y, scale_factor=2.0, mode="nearest")))
        return self.leave(F.silu(self.norm(y)))


class PlainResidual(nn.Module):
    """Two normalised convolutions."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, width), nn.GroupNorm(32, out)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


def _latents(model: Callable[[], nn.Module], *shape: int, steps: bool) -> Callable[[], Case]:
    def build() -> Case:
        with torch.device("meta"):
            x = torch.empty(*shape, dtype=torch.bfloat16)
            times = (torch.empty(shape[0]),) if steps else ()
            return model().to(torch.bfloat16), (x, *times), {}

    return build


def _diffusers(
    name: str, inputs: Mapping[str, tuple[int, ...]], steps: int, method: str = "", **settings: Any
) -> Callable[[], Case]:
    """A model of diffusers on bf16 inputs of these shapes, at `steps` time steps (0: it has none).

    method: what is called, if not the model itself.
    """

    def build() -> Case:
        import diffusers

        with torch.device("meta"):
            model = getattr(diffusers, name)(**settings).to(torch.bfloat16).eval()
            kwargs = {key: torch.empty(*shape) for key, shape in inputs.items()}
            for key in kwargs:
                if not key.endswith("_ids"):
                    kwargs[key] = kwargs[key].to(torch.bfloat16)
            if steps:
                kwargs["timestep"] = torch.empty(steps)
        return (_Called(model, method) if method else model), (), kwargs

    return build


class _Called(nn.Module):
    """A method of a model as a model."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, **inputs: Tensor) -> Tensor:
        return getattr(self.model, self.method)(**inputs).sample


class Classifier(nn.Module):
    """Hand-written attention with a softmax, and a loss."""

    def __init__(self, width: int = 512, heads: int = 8, classes: int = 1000) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)
        self.heads = heads

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8 + torch.eye(x.shape[1]).to(x)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        logits = self.head(F.gelu(x + self.out(y)).mean(1))
        return F.cross_entropy(logits.float(), target, label_smoothing=0.1)


def _classifier() -> Case:
    with torch.device("meta"):
        model = Classifier()
        x, target = torch.empty(8, 128, 512), torch.empty(8, dtype=torch.long)
    return model, (x, target), {}


_MOE = {"num_hidden_layers": 2, "use_cache": False}

MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": _language("GPT2", "LMHeadModel", n_layer=2),
    "llama": _language(
        "Llama", num_hidden_layers=2, num_key_value_heads=8, hidden_size=4096,
        intermediate_size=14336, vocab_size=128256,
    ),
    "bert": _language("Bert", "Model", num_hidden_layers=2),
    "qwen3": _language(
        "Qwen3", num_hidden_layers=2, hidden_size=4096, intermediate_size=12288, head_dim=128,
        num_attention_heads=32, num_key_value_heads=8,
    ),
    "mixtral": _language("Mixtral", **_MOE),
    "deepseek-v3": _language("DeepseekV3", first_k_dense_replace=1, **_MOE),
    "gemma2": _language("Gemma2", **_MOE),
    "t5-encoder": _language("T5", "EncoderModel", num_layers=2),
    "opt": _language("OPT", num_hidden_layers=2),
    "gpt-neox": _language("GPTNeoX", num_hidden_layers=2, hidden_size=2048, intermediate_size=8192,
                          num_attention_heads=16),
    "phi3": _language("Phi3", pad_token_id=0, **_MOE),
    "olmoe": _language("Olmoe", **_MOE),
    "convnext": _images("ConvNext", depths=[1, 1, 2, 1]),
    "vit-b": _example("vit"),
    "resnet-50": _example("resnet"),
    "lstm-tagger": _example("lstm_tagger"),
    "control-flow": _example("control_flow"),
    "swin": _images("Swin", depths=[1, 1, 2, 1]),
    "segformer": _images("Segformer", depths=[1, 1, 1, 1]),
    "mobilenet-v2": _images("MobileNetV2"),
    "dinov2": _images("Dinov2", num_hidden_layers=2),
    "diffusion": _latents(DiffusionBlock, 2, 4, 64, 64, steps=True),
    "dit": _latents(DiffusionTransformer, 8, 4, 32, 32, steps=True),
    "decoder": _latents(ImageDecoder, 1, 4, 64, 64, steps=False),
    "sd-unet": _diffusers(
        "UNet2DConditionModel",
        {"sample": (2, 4, 64, 64), "encoder_hidden_states": (2, 77, 768)}, 2,
        block_out_channels=(320, 640), layers_per_block=1, cross_attention_dim=768,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    ),
    "sd3": _diffusers(
        "SD3Transformer2DModel",
        {"hidden_states": (2, 16, 64, 64), "encoder_hidden_states": (2, 154, 4096),
         "pooled_projections": (2, 2048)}, 2, num_layers=2, sample_size=64,
    ),
    "flux": _diffusers(
        "FluxTransformer2DModel",
        {"hidden_states": (1, 1024, 64), "encoder_hidden_states": (1, 512, 4096),
         "pooled_projections": (1, 768), "img_ids": (1024, 3), "txt_ids": (512, 3)}, 1,
        num_layers=1, num_single_layers=1,
    ),
    "vae": _diffusers(
        "AutoencoderKL", {"z": (1, 4, 64, 64)}, 0, "decode", block_out_channels=(128, 256),
        up_block_types=("UpDecoderBlock2D",) * 2, down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1, latent_channels=4,
    ),
    "classifier": _classifier,
}  # fmt: skip

DIFFUSERS = frozenset(("sd-unet", "sd3", "flux", "vae"))
"""Those that need diffusers."""
