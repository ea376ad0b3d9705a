"""Matrix FLOPs of nine common tasks against arithmetic from their dimensions, nothing else.

One multiply-add is 2 FLOP, attention is dense, every position has logits.  Modules with real
weights and real inputs give what modules on meta give, as far as this machine can hold them.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftrace as rt
from tests.conftest import rotary_product

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BATCH, TOKENS = 8, 255


def matrix_flops(module: nn.Module, *args: Any, phase: str = "forward", **kwargs: Any) -> int:
    graph = rt.trace(module, *args, phase=phase, **kwargs)
    planned = rt.plan(graph, "eager")
    assert not planned.coverage.unsupported
    return planned.total.flops(("matmul", "convolution"))


def example(name: str, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "models" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.device(device):
        built: tuple[nn.Module, tuple[Tensor, ...]] = module.build()
    return built


@cache
def phase_of(config: str, phase: str, kv: int | None = None) -> Any:
    path = EXAMPLES / "configs" / f"{config}.json"
    request = rt.types.Request(batch=BATCH, seq=TOKENS, kv=kv)
    return rt.tools.trace_target(path, (phase,), request)[phase]


def attention(batch: int, heads: int, queries: int, keys: int, width: int, value: int = 0) -> int:
    """Scores and weighted values: 2 (E + Ev) per pair and head."""
    return 2 * batch * heads * queries * keys * (width + (value or width))


# -- 1, 2: images ----------------------------------------------------------------------------------


def resnet50() -> int:
    """Table 1 of arXiv 1512.03385: a stem, [3, 4, 6, 3] bottlenecks, a classifier; per image."""
    macs = 112 * 112 * 64 * 3 * 7 * 7
    channels, side = 64, 56
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(depth):
            before = side
            if block == 0 and stage > 0:
                side //= 2
            macs += before**2 * channels * width  # 1x1, before the stride
            macs += side**2 * width * width * 3 * 3
            macs += side**2 * width * 4 * width
            if block == 0:
                macs += side**2 * channels * 4 * width  # the shortcut
            channels = 4 * width
    return 2 * (macs + channels * 1000)


def vit_b16() -> int:
    """Table 1 of arXiv 2010.11929: 12 layers of width 768 over 196 patches and a class token."""
    tokens, width = 14 * 14 + 1, 768
    layers = 12 * (2 * tokens * 12 * width**2 + attention(1, 12, tokens, tokens, 64))
    return 2 * 196 * 3 * 16 * 16 * width + layers + 2 * width * 1000


@pytest.mark.slow
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("name", "truth", "rounded"), [("resnet", resnet50, 6.5427e10), ("vit", vit_b16, 2.8102e11)]
)
def test_image_models(name: str, truth: Callable[[], int], rounded: float, device: str) -> None:
    module, (images,) = example(name, device)
    assert matrix_flops(module, images) == len(images) * truth()
    assert len(images) * truth() == pytest.approx(rounded, rel=5e-4)


# -- 3, 9: GPT-2 -----------------------------------------------------------------------------------


def gpt2(rows: int, length: int, layers: int = 12) -> int:
    """Layers of 12 d^2, attention, and logits with the tied embedding."""
    d, vocabulary = 768, 50257
    dense = 2 * rows * (layers * 12 * d**2 + d * vocabulary)
    return dense + layers * attention(rows // length, 12, length, length, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "layers"), [("meta", 12), ("cpu", 2)])
def test_gpt2_forward_and_training(device: str, layers: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=layers)
    with torch.device(device):
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    truth = gpt2(BATCH * TOKENS, TOKENS, layers)
    assert gpt2(BATCH * TOKENS, TOKENS) == pytest.approx(5.2319e11, rel=5e-4)
    assert matrix_flops(model, input_ids=ids) == truth
    # Every product has two gradients, as each of its operands needs one.
    assert matrix_flops(model, input_ids=ids, labels=ids, phase="training") == 3 * truth


# -- 4, 5: Llama-3.1-8B (its weights are 16 GB: on meta only) --------------------------------------


def llama(rows: int, queries: int, keys: int) -> int:
    """32 layers: q and o of d^2, k and v of a quarter, three of d x 14336; 32 heads of 128."""
    d, layers = 4096, 32
    weights = layers * (2 * d * d + 2 * d * d // 4 + 3 * d * 14336) + d * 128256
    return 2 * rows * weights + layers * attention(rows // queries, 32, queries, keys, 128)


@pytest.mark.slow
def test_llama_prefill_and_decode() -> None:
    pytest.importorskip("transformers")
    prefill = rt.plan(phase_of("llama-3.1-8b", "prefill"), "eager")
    truth = llama(BATCH * TOKENS, TOKENS, TOKENS)
    assert prefill.total.flops(("matmul",)) == truth + rotary_product(TOKENS, 128)
    assert truth == pytest.approx(3.0892e13, rel=5e-4)
    decode = rt.plan(phase_of("llama-3.1-8b", "decode", kv=4096), "eager")
    truth = llama(BATCH, 1, 4096 + 1)
    assert decode.total.flops(("matmul",)) == truth + rotary_product(1, 128)
    assert truth == pytest.approx(1.3726e11, rel=5e-4)


@pytest.mark.slow
def test_llama_prefill_moves_between_the_least_and_everything() -> None:
    """Weights once, ids in, logits and cache out; and what 8x255 tokens move unfused, 101.5 GB."""
    pytest.importorskip("transformers")
    graph = phase_of("llama-3.1-8b", "prefill")
    efficient, eager, naive = (rt.plan(graph, e) for e in ("efficient", "eager", "naive"))
    weights = 2 * (llama(2, 2, 0) // 4)  # bf16; half the FLOPs of one row are its weights
    rows = BATCH * TOKENS
    logits, cache = 2 * rows * 128256, 2 * rows * 32 * 2 * 1024
    least = weights + logits + cache
    assert least == pytest.approx(15.8e9, rel=0.005)
    assert efficient.compulsory == pytest.approx(least, rel=0.005)
    assert least < efficient.bytes.total < eager.bytes.total <= naive.bytes.total < 101.5e9


# -- 6: DeepSeek-V3 (671 B parameters: on meta only) -----------------------------------------------


def deepseek_v3(rows: int, length: int) -> int:
    """arXiv 2412.19437, section 4.2: 61 layers, 3 of them dense; 8 of 256 experts and a shared."""
    d, heads = 7168, 128
    latent = d * 1536 + 1536 * heads * (128 + 64) + d * (512 + 64) + 512 * heads * (128 + 128)
    layer = latent + heads * 128 * d
    dense, expert = 3 * d * 18432, 3 * d * 2048
    weights = 61 * layer + 3 * dense + 58 * (d * 256 + (8 + 1) * expert) + d * 129280
    pairs = attention(rows // length, heads, length, length, 128 + 64, 128)
    return 2 * rows * weights + 61 * pairs


@pytest.mark.slow
def test_deepseek_v3_prefill() -> None:
    pytest.importorskip("transformers")
    planned = rt.plan(phase_of("deepseek-v3", "prefill"), "eager")
    truth = deepseek_v3(BATCH * TOKENS, TOKENS)
    assert truth == pytest.approx(1.5203e14, rel=5e-4)
    assert planned.total.flops(("matmul",)) == truth + rotary_product(TOKENS, 64)


# -- 7: a module of one's own ----------------------------------------------------------------------


class Custom(nn.Module):
    """SDPA, einsum, a functional product, a module called twice, kwargs, an `if` on data."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.shared = nn.Linear(d, d)
        self.mixing = nn.Parameter(torch.ones(d, d))

    def forward(self, x: Tensor, *, scale: float = 1.0, extra: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        y = self.shared(self.shared(mixed.transpose(1, 2).flatten(2))) * scale
        if extra is not None:
            y = y + torch.einsum("btd,de->bte", extra, self.mixing)
        if y.abs().max() >= 0:  # known only of real values, and then true
            y = torch.matmul(y, self.mixing)
        return y


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_custom_module(device: str) -> None:
    b, t, d, heads = 4, 128, 256, 8
    with torch.device(device):
        module, x, extra = Custom(d, heads), torch.ones(b, t, d), torch.ones(b, t, d)
    linear = 2 * b * t * d * d
    # qkv is three of them, `shared` runs twice, the einsum and the product are one each.
    truth = (3 + 2 + 1 + 1) * linear + attention(b, heads, t, t, d // heads)
    given = {"scale": 0.5, "extra": extra}
    assert matrix_flops(module, x, **given, assume={"branch": True}) == truth
    assert matrix_flops(module, x, **given, assume={"branch": False}) == truth - linear
    assert matrix_flops(module, x, scale=0.5, assume={"branch": True}) == truth - linear


# -- 8: a recurrent network ------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_an_lstm_tagger(device: str) -> None:
    module, (tokens,) = example("lstm_tagger", device)
    rows, width, hidden, tags = tokens.numel(), 256, 512, 17
    truth = 0
    for inputs in (width, 2 * hidden):  # the second layer reads both directions
        for _direction in range(2):
            truth += 2 * rows * 4 * hidden * (inputs + hidden)
    truth += 2 * rows * 2 * hidden * tags
    assert matrix_flops(module, tokens) == truth
