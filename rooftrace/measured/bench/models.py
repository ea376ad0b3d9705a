"""The models of the measurement suite, built with random weights and inputs; none is downloaded."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import ProfileError
from rooftrace.graph import OpGraph
from rooftrace.measured.bench import nets
from rooftrace.measured.bench.runfile import ModelRow

Sizes = Mapping[str, int]
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SuiteModel:
    """One model of the suite: how it is built at each scale, and its inputs."""

    name: str
    kind: str  # the sort of model; a short budget is spread over the kinds
    settings: Mapping[str, Settings]  # by scale
    build: Callable[[Settings], nn.Module]
    # Keyword arguments for these sizes, made by `floats(*shape)` and `ids(below, *shape)`.
    inputs: Callable[[Settings, Sizes, Make], dict[str, Tensor]]
    steps: Mapping[str, Sequence[tuple[str, Sizes]]]  # phase and sizes, by scale, in order of worth
    library: str = ""  # that it needs in addition to torch
    channels_last: bool = False

    def dtype(self, device: str) -> torch.dtype:
        """The precision of its weights on this kind of device."""
        if device.startswith("cpu"):
            return torch.float32
        return torch.float16 if self.kind == "convolution" else torch.bfloat16

    def there(self) -> bool:
        """Whether its library is installed."""
        return not self.library or importlib.util.find_spec(self.library) is not None

    def made(self, scale: str, device: str, dtype: torch.dtype) -> nn.Module:
        """The module with random weights, for inference."""
        with _built_on(device, dtype), torch.random.fork_rng(devices=_generators(device)):
            torch.manual_seed(0)
            module = self.build(self.settings[scale]).eval()
        if self.channels_last:
            convert: Any = module.to
            convert(memory_format=torch.channels_last)
        return module


@dataclass(frozen=True)
class Make:
    """Makes input tensors on one device."""

    floats: Callable[..., Tensor]
    ids: Callable[..., Tensor]

    @staticmethod
    def on(device: str, dtype: torch.dtype, channels_last: bool = False) -> Make:
        """Random tensors; on meta only sizes, except token ids, which keep their values."""
        layout = torch.channels_last if channels_last else torch.contiguous_format

        def floats(*shape: int) -> Tensor:
            made = torch.randn(*shape, device=device).to(dtype)
            return made.contiguous(memory_format=layout) if made.dim() == 4 else made

        def ids(below: int, *shape: int) -> Tensor:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(below, shape, generator=generator)
            return drawn if device == "meta" else drawn.to(device)

        return Make(floats, ids)


@contextlib.contextmanager
def _built_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def _generators(device: str) -> list[int]:
    return [torch.device(device).index or 0] if device.startswith("cuda") else []


# -- language models -------------------------------------------------------------------------------
# A model has up to three scales: full for a GPU, small for a CPU, tiny for a trial.  A row in a
# run file names model, scale, phase and sizes, so that `traced_model` can capture the same step
# again, on meta.


def _steps(*cases: tuple[str, int, int] | tuple[str, int]) -> list[tuple[str, Sizes]]:
    """("decode", batch, kv), ("prefill", batch, seq), ("forward", batch) as phase and sizes."""
    names = {"decode": ("batch", "kv")}
    return [(p, dict(zip(names.get(p, ("batch", "seq")), n, strict=False))) for p, *n in cases]


_CACHED = {
    "full": _steps(
        ("prefill", 8, 512),
        ("decode", 8, 512),
        ("training", 4, 512),
        ("prefill", 1, 128),
        ("decode", 1, 512),
        ("decode", 64, 512),
        ("prefill", 4, 2048),
        ("decode", 8, 4000),
        ("prefill", 1, 1000),
    ),
    "small": _steps(
        ("prefill", 2, 128), ("decode", 4, 128), ("training", 1, 64), ("decode", 1, 500)
    ),
    "tiny": _steps(("prefill", 2, 16), ("decode", 2, 16), ("training", 2, 16)),
}
_SHORT = {
    "full": _steps(
        ("prefill", 8, 512), ("decode", 8, 512), ("training", 8, 512), ("decode", 1, 512)
    ),
    "small": _CACHED["small"],
    "tiny": _CACHED["tiny"],
}
_SEQUENCES = {
    "full": _steps(("forward", 16, 512), ("training", 8, 512), ("forward", 1, 128)),
    "small": _steps(("forward", 2, 128), ("training", 1, 64)),
    "tiny": _steps(("forward", 2, 16), ("training", 2, 16)),
}
_IMAGES = {
    "full": _steps(("forward", 32), ("training", 64), ("forward", 1), ("forward", 256)),
    "small": _steps(("forward", 4), ("training", 2), ("forward", 1)),
    "tiny": _steps(("forward", 2), ("training", 2)),
}
_CLICKS = {
    "full": _steps(("forward", 2048), ("training", 2048), ("forward", 128)),
    "small": _steps(("forward", 256), ("training", 128), ("forward", 32)),
    "tiny": _steps(("forward", 8), ("training", 8)),
}
_PICTURES = {
    "full": _steps(("forward", 2), ("training", 2), ("forward", 8)),
    "small": _steps(("forward", 1), ("training", 1)),
    "tiny": _steps(("forward", 1), ("training", 1)),
}


def _prompt(settings: Settings, sizes: Sizes, make: Make) -> dict[str, Tensor]:
    below = settings.get("vocab_size") or settings["vocabulary"]
    return {"input_ids": make.ids(below, sizes["batch"], sizes.get("kv") or sizes["seq"])}


Builder = Callable[[Settings], nn.Module]


def _net(net: Callable[..., nn.Module], *of_inputs: str) -> Builder:
    """Builds a net from settings, some of which are sizes of its inputs alone."""
    return lambda settings: net(**{n: v for n, v in settings.items() if n not in of_inputs})


def _hugging_face(family: str, head: str) -> Builder:
    def build(settings: Settings) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**settings)
        module: nn.Module = getattr(transformers, family + head)(config)
        return module

    return build


def _model(
    name: str,
    kind: str,
    build: Builder | str,
    inputs: Callable[[Settings, Sizes, Make], dict[str, Tensor]],
    steps: Mapping[str, Sequence[tuple[str, Sizes]]],
    **scales: Settings,
) -> SuiteModel:
    """A model of the suite.  build: a net, or the family and head of a class of transformers."""
    return SuiteModel(
        name=name,
        kind=kind,
        settings=scales,
        build=_hugging_face(*build.split()) if isinstance(build, str) else build,
        inputs=inputs,
        steps=steps,
        library="transformers" if isinstance(build, str) else "",
    )


def _settings(names: str, *values: Any, **more: Any) -> dict[str, Any]:
    return {**dict(zip(names.split(), values, strict=True)), **more}


_decoder = partial(_settings, "width layers heads key_heads hidden vocabulary")
_bert = partial(
    _settings,
    "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size",
)
_llama = partial(
    _settings,
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "vocab_size",
    max_position_embeddings=8192,
)
_gpt2 = partial(
    _settings,
    "n_layer n_embd n_head vocab_size",
    n_positions=1024,
    bos_token_id=0,
    eos_token_id=0,
)


def _deepseek(
    width: int, hidden: int, layers: int, heads: int, experts: int, each: int, rank: int, head: int
) -> dict[str, Any]:
    return {
        **_llama(width, hidden, layers, heads, heads, 32000 if width > 1000 else 512),
        "first_k_dense_replace": 1,
        "n_routed_experts": experts,
        "moe_intermediate_size": each,
        "q_lora_rank": 3 * rank,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": head // 2,
        "qk_nope_head_dim": head,
        "v_head_dim": head,
        "n_group": min(8, experts // 2),
        "topk_group": min(4, experts // 4),
        "num_experts_per_tok": min(8, experts // 4),
    }


# -- other models ----------------------------------------------------------------------------------


def _image(settings: Settings, sizes: Sizes, make: Make) -> dict[str, Tensor]:
    side = settings.get("image", settings.get("side", 224))
    return {"x": make.floats(sizes["batch"], 3, side, side)}


def _pixels(settings: Settings, sizes: Sizes, make: Make) -> dict[str, Tensor]:
    side = settings.get("image_size", 224)
    return {"pixel_values": make.floats(sizes["batch"], 3, side, side)}


def _noise(settings: Settings, sizes: Sizes, make: Make) -> dict[str, Tensor]:
    batch, side = sizes["batch"], settings["side"]
    return {
        "x": make.floats(batch, 4, side, side),
        "step": make.floats(batch),
        "text": make.floats(batch, 77, settings["context"]),
    }


def _clicks(settings: Settings, sizes: Sizes, make: Make) -> dict[str, Tensor]:
    batch = sizes["batch"]
    return {
        "dense": make.floats(batch, settings["dense"]),
        "ids": make.ids(settings["rows"], batch, settings["tables"], settings["looked_up"]),
    }


def _words(settings: Settings, sizes: Sizes, make: Make) -> dict[str, Tensor]:
    return {"words": make.ids(settings["vocabulary"], sizes["batch"], sizes["seq"])}


_RESNET = _model(
    "resnet-50",
    "convolution",
    _net(nets.ConvNet, "side"),
    _image,
    _IMAGES,
    full=dict(widths=(64, 128, 256, 512), depths=(3, 4, 6, 3)),
    small=dict(widths=(64, 128, 256, 512), depths=(2, 2, 2, 2), side=112),
    tiny=dict(widths=(8, 16), depths=(1, 1), side=32),
)

MODELS: tuple[SuiteModel, ...] = (
    _model(
        "decoder",
        "dense",
        _net(nets.Decoder),
        _prompt,
        _CACHED,
        full=_decoder(2048, 16, 16, 4, 8192, 32000),
        small=_decoder(512, 4, 8, 4, 1408, 8192),
        tiny=_decoder(64, 2, 4, 2, 128, 512),
    ),
    _RESNET,
    _model(
        "vit-l",
        "vision",
        _net(nets.VisionTransformer),
        _image,
        _IMAGES,
        full=dict(image=224, patch=16, width=1024, layers=24, heads=16),
        small=dict(image=112, patch=16, width=384, layers=6, heads=6),
        tiny=dict(image=32, patch=8, width=64, layers=2, heads=4),
    ),
    _model(
        "mixture",
        "experts",
        _net(nets.Decoder),
        _prompt,
        _SHORT,
        full=_decoder(2048, 8, 16, 4, 4096, 32000, experts=8),
        small=_decoder(384, 3, 6, 2, 768, 4096, experts=8),
        tiny=_decoder(64, 1, 4, 2, 96, 256, experts=4),
    ),
    _model(
        "unet",
        "diffusion",
        _net(nets.UNet, "side"),
        _noise,
        _PICTURES,
        full=dict(width=320, factors=(1, 2, 4), heads=8, context=768, side=64),
        small=dict(width=64, factors=(1, 2, 4), heads=4, context=128, side=32),
        tiny=dict(width=16, factors=(1, 2), heads=2, context=16, side=16),
    ),
    _model(
        "lstm",
        "recurrent",
        _net(nets.Recurrent),
        _words,
        _SEQUENCES,
        full=dict(vocabulary=32000, width=512, hidden=1024, layers=3),
        small=dict(vocabulary=4096, width=128, hidden=256, layers=2),
        tiny=dict(vocabulary=256, width=16, hidden=32, layers=1),
    ),
    _model(
        "llama-1b",
        "dense",
        "Llama ForCausalLM",
        _prompt,
        _CACHED,
        full=_llama(2048, 8192, 16, 32, 8, 128256),
        small=_llama(512, 1408, 4, 8, 4, 8192),
        tiny=_llama(64, 128, 2, 4, 2, 512),
    ),
    _model(
        "bert-large",
        "encoder",
        "Bert Model",
        _prompt,
        _SEQUENCES,
        full=_bert(1024, 24, 16, 4096, 30522),
        small=_bert(384, 6, 6, 1536, 8192),
        tiny=_bert(64, 2, 4, 128, 512),
    ),
    _model(
        "deepseek-v3-cut",
        "experts",
        "DeepseekV3 ForCausalLM",
        _prompt,
        _SHORT,
        full=_deepseek(4096, 9216, 4, 64, 64, 1536, 512, 128),
        small=_deepseek(256, 512, 3, 8, 16, 128, 64, 32),
        tiny=_deepseek(64, 128, 2, 4, 8, 32, 16, 16),
    ),
    _model(
        "convnext-b",
        "convolution",
        "ConvNext ForImageClassification",
        _pixels,
        _IMAGES,
        full=dict(hidden_sizes=[128, 256, 512, 1024], depths=[3, 3, 27, 3]),
        small=dict(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], image_size=96),
        tiny=dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], image_size=64),
    ),
    _model(
        "mixtral-8x1b",
        "experts",
        "Mixtral ForCausalLM",
        _prompt,
        _SHORT,
        full=_llama(2048, 7168, 8, 32, 8, 32000),
        small=_llama(256, 512, 3, 8, 4, 4096, num_local_experts=8),
        tiny=_llama(64, 96, 1, 4, 2, 256, num_local_experts=4),
    ),
    _model(
        "gpt2",
        "dense",
        "GPT2 LMHeadModel",
        _prompt,
        _SHORT,
        full=_gpt2(12, 768, 12, 50257),
        small=_gpt2(4, 256, 4, 4096),
        tiny=_gpt2(2, 64, 4, 512),
    ),
    _model(
        "mobile",
        "convolution",
        _net(nets.ConvNet, "side"),
        _image,
        _IMAGES,
        full=dict(widths=(32, 64, 128, 256), depths=(2, 3, 5, 3), inverted=True),
        small=dict(widths=(16, 32, 64, 128), depths=(1, 2, 3, 2), inverted=True, side=112),
        tiny=dict(widths=(8, 16), depths=(1, 1), inverted=True, side=32),
    ),
    replace(_RESNET, name="resnet-50-channels-last", channels_last=True),
    _model(
        "recommender",
        "recommender",
        _net(nets.Recommender, "looked_up"),
        _clicks,
        _CLICKS,
        full=dict(rows=400_000, tables=26, width=128, dense=13, hidden=1024, looked_up=20),
        small=dict(rows=40_000, tables=12, width=64, dense=13, hidden=512, looked_up=10),
        tiny=dict(rows=100, tables=3, width=8, dense=5, hidden=16, looked_up=2),
    ),
    _model(
        "t5-large-encoder",
        "encoder",
        "T5 EncoderModel",
        _prompt,
        _SEQUENCES,
        full=dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, d_kv=64, vocab_size=32128),
        small=dict(d_model=256, d_ff=1024, num_layers=4, num_heads=4, d_kv=64, vocab_size=4096),
        tiny=dict(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=512),
    ),
    _model(
        "llama-8b",
        "dense",
        "Llama ForCausalLM",
        _prompt,
        {"full": [step for step in _CACHED["full"] if step[0] != "training"]},
        full=_llama(4096, 14336, 32, 32, 8, 128256),
    ),
)


def named(name: str) -> SuiteModel:
    """The model of the suite with this name.  Raises LookupError."""
    for model in MODELS:
        if model.name == name:
            return model
    raise LookupError(
        f"the suite has no model {name!r}; it has {', '.join(model.name for model in MODELS)}"
    )


def traced_model(row: ModelRow) -> OpGraph:
    """The graph of the step that `row` measured, captured on meta.

    Raises ProfileError for a row of a model that is not of the suite.
    """
    from rooftrace.tracer import trace
    from rooftrace.tracer.values import torch_dtype

    try:
        model = named(row.model)
    except LookupError as error:
        raise ProfileError(f"{row.key!r}: {error.args[0]}") from None
    dtype = torch_dtype(row.dtype)
    make = Make.on("meta", dtype, model.channels_last)
    kwargs: dict[str, Any] = dict(model.inputs(model.settings[row.scale], row.sizes, make))
    module = model.made(row.scale, "meta", dtype)
    return trace(module, phase=row.phase, optimizer="adamw", **kwargs)
