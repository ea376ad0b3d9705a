"""Small models of every kind, and what the tracer tests share."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.releases import EXPERTS_HAVE_IMPLEMENTATIONS


class Case(NamedTuple):
    """A module with real weights and the arguments of one call."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


def tokens(batch: int, length: int, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def config(kind: str, **settings: Any) -> Any:
    """A Hugging Face config without dropout, so that a training run has one result."""
    config = getattr(pytest.importorskip("transformers"), kind)(**settings)
    for name in list(vars(config)):
        if name.endswith(("dropout", "dropout_prob", "dropout_rate", "pdrop")):
            setattr(config, name, 0.0)
    return config


WIDTHS = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2)
TEXT = dict(**WIDTHS, vocab_size=64)
DEEPSEEK = dict(
    vocab_size=64,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=12,
)


def built(name: str, config: Any, **settings: Any) -> nn.Module:
    kind = getattr(pytest.importorskip("transformers"), name)
    if not EXPERTS_HAVE_IMPLEMENTATIONS:
        settings.pop("experts_implementation", None)
    model: nn.Module = kind._from_config(config, **settings)
    return model.eval()


def text_model(name: str, config: Any, length: int = 9, **settings: Any) -> Case:
    return Case(built(name, config, **settings), (), {"input_ids": tokens(2, length)})


def gpt2() -> Case:
    return text_model(
        "GPT2LMHeadModel",
        config(
            "GPT2Config",
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        ),
    )


def llama() -> Case:
    return text_model("LlamaForCausalLM", config("LlamaConfig", **TEXT, num_key_value_heads=2))


def bert() -> Case:
    return text_model("BertForMaskedLM", config("BertConfig", **TEXT))


def t5() -> Case:
    case = text_model(
        "T5ForConditionalGeneration",
        config("T5Config", vocab_size=64, num_layers=2, d_model=32, d_ff=48, num_heads=4, d_kv=8),
    )
    return Case(case.module, (), {**case.kwargs, "decoder_input_ids": tokens(2, 7)})


def mixtral(experts: str = "batched_mm") -> Case:
    shape = config("MixtralConfig", **TEXT, num_key_value_heads=2, num_local_experts=4)
    return text_model("MixtralForCausalLM", shape, 8, experts_implementation=experts)


def deepseek(experts: str = "batched_mm") -> Case:
    shape = config("DeepseekV3Config", **DEEPSEEK)
    return text_model("DeepseekV3ForCausalLM", shape, 8, experts_implementation=experts)


def mamba() -> Case:
    shape = config("MambaConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=16)
    return text_model("MambaForCausalLM", shape, 12)


def mamba2() -> Case:
    shape = config(
        "Mamba2Config",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=16,
        head_dim=8,
        num_heads=8,
        n_groups=1,
        chunk_size=4,
    )
    return text_model("Mamba2ForCausalLM", shape, 8)


class Residual(nn.Module):
    """A convolution block of a diffusion model, with the time step added in the middle."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, out, 3, 1, 1)
        )
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(nn.GroupNorm(4, out), nn.SiLU(), nn.Conv2d(out, out, 3, 1, 1))
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        found: torch.Tensor = self.skip(x) + self.second(y)
        return found


class UNet(nn.Module):
    """A small diffusion model: down, attention in the middle, up with skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.inside = nn.Conv2d(4, width, 3, 1, 1)
        self.down = nn.ModuleList([Residual(width, width, width), Residual(width, width, width)])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.ModuleList([Residual(2 * width, width, width) for _ in range(2)])
        self.outside = nn.Conv2d(width, 4, 3, 1, 1)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-torch.arange(self.width // 2, device=x.device) / self.width)
        angle = step[:, None] * rates
        time = torch.cat([angle.sin(), angle.cos()], dim=-1)
        x = self.inside(x)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        flat = x.flatten(2).transpose(1, 2)
        flat = flat + self.attention(flat, flat, flat, need_weights=False)[0]
        x = flat.transpose(1, 2).reshape(x.shape)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        found: torch.Tensor = self.outside(x)
        return found


def unet() -> Case:
    return Case(UNet().eval(), (torch.randn(2, 4, 16, 16), torch.tensor([3.0, 7.0])))


def vit() -> Case:
    shape = config("ViTConfig", **WIDTHS, image_size=32, patch_size=8)
    return Case(
        built("ViTForImageClassification", shape), (), {"pixel_values": torch.randn(2, 3, 32, 32)}
    )


def example(file: str) -> Any:
    """A module of examples/models."""
    path = Path(__file__).resolve().parents[2] / "examples" / "models" / f"{file}.py"
    spec = importlib.util.spec_from_file_location(f"_example_{file}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resnet() -> Case:
    return Case(example("resnet").ResNet(depths=(1, 1)).eval(), (torch.randn(2, 3, 32, 32),))


def vit_example() -> Case:
    model = example("vit").VisionTransformer(image=32, patch=8, width=32, depth=2, heads=4)
    return Case(model.eval(), (torch.randn(2, 3, 32, 32),))


def lstm() -> Case:
    return Case(example("lstm_tagger").LSTMTagger(50, 5, 8, 16).eval(), (tokens(2, 6, 50),))


class Packed(nn.Module):
    """A recurrent network over sequences of unequal length."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found: torch.Tensor = self.head(pad_packed_sequence(self.rnn(packed)[0])[0])
        return found


def packed(kind: Any = nn.LSTM) -> Case:
    return Case(Packed(kind).eval(), (torch.randn(3, 7, 8), torch.tensor([7, 3, 5])))


def control_flow() -> Case:
    inputs = {"x": torch.randn(2, 8, 16), "steps": 3, "context": torch.randn(2, 4, 16)}
    return Case(example("control_flow").Refiner(16).eval(), (), inputs)


def transformer() -> Case:
    model = nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)
    return Case(model.eval(), (torch.randn(2, 7, 32), torch.randn(2, 5, 32)))


def perceptron() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    return Case(model.eval(), (torch.randn(3, 8),))


MODELS: dict[str, Callable[[], Case]] = {
    made.__name__: made
    for made in (
        gpt2,
        llama,
        bert,
        t5,
        mixtral,
        deepseek,
        mamba,
        mamba2,
        unet,
        vit,
        resnet,
        vit_example,
        lstm,
        packed,
        control_flow,
        transformer,
        perceptron,
    )
}


@pytest.fixture
def model() -> Callable[..., Case]:
    """`model("llama")`: a small model with real weights, the same at every call."""

    def made(name: str, *settings: Any) -> Case:
        torch.manual_seed(0)
        return MODELS[name](*settings)

    return made


@pytest.fixture
def module() -> Callable[..., nn.Module]:
    """`module(f)`: a module with one linear layer `lin`, 8 wide, whose forward is f(self, ...)."""

    def made(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
        class Written(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(8, 8)
                for name, value in attributes.items():
                    setattr(self, name, value)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return forward(self, *args, **kwargs)

        return Written()

    return made
