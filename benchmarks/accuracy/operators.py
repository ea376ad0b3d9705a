"""The steps of Liger-Kernel's memory benchmarks: its baselines of PyTorch and transformers.

Each is measured as the most that is allocated in a call which runs several times, so every step
runs its call twice: at the second, gradients of the first are there.  What a script puts on the
device and does not use (Liger's own module) is counted beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Sizes = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Made:
    """A step that a trace runs, what it is called with, and bytes that lie beside."""

    step: Callable[..., None]
    arguments: tuple[Any, ...]
    beside: int = 0
    workspaces: int = 0  # of BLAS, that calls before this one have left in the process


def _randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def _twice(module: nn.Module, x: Tensor, gradient: Tensor) -> None:
    def full() -> None:
        module(x).backward(gradient, retain_graph=True)

    full()
    full()


class RmsNorm(nn.Module):
    """Spelled out in fp32, as transformers' models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + 1e-6)
        return self.weight * x.to(kind)


def rms_norm(s: Sizes) -> Made:
    """Two norms are on the device; the input is bf16, the weights are fp32."""
    x = _randn(s["M"], s["H"], dtype=DTYPES[s["dtype"]], grad=True)
    return Made(_twice, (RmsNorm(s["H"]), x, x.detach().clone()), 4 * s["H"])


def layer_norm(s: Sizes) -> Made:
    """As `rms_norm`, with nn.LayerNorm."""
    x = _randn(s["M"], s["N"], grad=True)
    return Made(_twice, (nn.LayerNorm(s["N"], device="meta"), x, x.detach().clone()), 8 * s["N"])


def group_norm(s: Sizes) -> Made:
    """nn.GroupNorm over [M, C, H]."""
    channels = s["C"]
    norm = nn.GroupNorm(channels // s["channels_per_group"], channels, device="meta")
    x = _randn(s["M"], channels, s["H"], grad=True)
    return Made(_twice, (norm, x, x.detach().clone()), 8 * channels)


class AddRmsNorm(RmsNorm):
    """A sum, and its norm; both come out."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        kind = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + 1e-6)
        return self.weight * x.to(kind), residual.to(kind)


def fused_add_rms_norm(s: Sizes) -> Made:
    """Two results, two gradients; three norms are on the device."""

    def step(module: nn.Module, x: Tensor, residual: Tensor, dy: Tensor, ds: Tensor) -> None:
        def full() -> None:
            y, total = module(x, residual)
            torch.autograd.backward((y, total), (dy, ds))

        full()
        full()

    x, residual = (_randn(s["M"], s["H"], grad=True) for _ in range(2))
    given = (x, residual, x.detach().clone(), x.detach().clone())
    return Made(step, (AddRmsNorm(s["H"]), *given), 3 * 4 * s["H"])


def megatron_rms_norm(s: Sizes) -> Made:
    """nn.RMSNorm in bf16, its sum differentiated."""

    def step(module: nn.Module, x: Tensor) -> None:
        def full() -> None:
            y = module(x)
            y.sum().backward()

        full()
        full()

    norm = nn.RMSNorm(s["H"], eps=1e-6, dtype=torch.bfloat16, device="meta")
    return Made(step, (norm, _randn(s["S"], s["B"], s["H"], dtype=torch.bfloat16, grad=True)))


def cross_entropy(s: Sizes) -> Made:
    """Logits in fp32 and indices."""

    def step(module: nn.Module, logits: Tensor, target: Tensor) -> None:
        def full() -> None:
            y = module(logits, target)
            y.backward()

        full()
        full()

    rows = s["B"] * s["T"]
    target = torch.zeros(rows, dtype=torch.long, device="meta")
    return Made(step, (nn.CrossEntropyLoss(), _randn(rows, s["V"], grad=True), target))


class Head(nn.Module):
    """A linear layer to the vocabulary and its cross entropy."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.lin = nn.Linear(s["H"], s["V"], bias=False, dtype=DTYPES[s["dtype"]], device="meta")
        self.loss = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.lin(x)
        return self.loss(logits, target)


def fused_linear_cross_entropy(s: Sizes) -> Made:
    """The other head's weight is on the device, too."""

    def step(module: nn.Module, x: Tensor, target: Tensor) -> None:
        def full() -> None:
            y = module(x, target)
            y.backward()

        full()
        full()

    x = _randn(s["BT"], s["H"], dtype=DTYPES[s["dtype"]], grad=True)
    target = torch.zeros(s["BT"], dtype=torch.long, device="meta")
    return Made(step, (Head(s), x, target), 2 * s["H"] * s["V"])


class Divergence(nn.Module):
    """The Jensen-Shannon divergence of logarithms of probabilities."""

    def __init__(self, dtype: torch.dtype = torch.float) -> None:
        super().__init__()
        self.kl, self.dtype = nn.KLDivLoss(reduction="batchmean", log_target=True), dtype

    def forward(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
        log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
        m = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
        loss = 0.5 * self.kl(torch.log(m), log_p) + 0.5 * self.kl(torch.log(m), log_q)
        return loss.to(self.dtype)


class Variation(nn.Module):
    """The total variation distance, averaged over rows."""

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        distance = torch.abs(p - q) / 2.0
        return torch.sum(distance) / p.size(0)


def _of_distributions(loss: nn.Module, first: str) -> Callable[[Sizes], Made]:
    """A loss of two distributions; autograd holds the logits of the first."""

    def made(s: Sizes) -> Made:
        def step(module: nn.Module, x: Tensor, target: Tensor) -> None:
            given = getattr(x, first)(dim=-1)

            def full() -> None:
                y = module(given, target)
                y.backward(retain_graph=True)

            full()
            full()

        rows = s["B"] * s["T"]
        return Made(step, (loss, _randn(rows, s["V"], grad=True), _randn(rows, s["V"])))

    return made


class JsdHeads(nn.Module):
    """Two linear layers to the vocabulary, and the divergence of what they say."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "dtype": DTYPES[s["dtype"]], "device": "meta"}
        self.student_lin = nn.Linear(s["H"], s["V"], **options)
        self.teacher_lin = nn.Linear(s["H"], s["V"], **options)
        self.jsd = Divergence(DTYPES[s["dtype"]])
        self.temperature = 1.0

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        student_logits = self.student_lin(student)
        teacher_logits = self.teacher_lin(teacher)
        student_prob = torch.log_softmax(student_logits / self.temperature, dim=-1)
        teacher_prob = torch.log_softmax(teacher_logits / self.temperature, dim=-1)
        return self.jsd(student_prob, teacher_prob)


def fused_linear_jsd(s: Sizes) -> Made:
    """Liger's module shares its weights with this one."""

    def step(module: nn.Module, student: Tensor, teacher: Tensor) -> None:
        def full() -> None:
            y = module(student, teacher)
            y.backward()

        full()
        full()

    kind = DTYPES[s["dtype"]]
    student = _randn(s["BT"], s["H"], dtype=kind, grad=True)
    return Made(step, (JsdHeads(s), student, _randn(s["BT"], s["H"], dtype=kind)))


def mlp(s: Sizes, act: str, mode: str) -> Made:
    """transformers' LlamaMLP: forward, backward of a kept graph, or both."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"hidden_size": s["hidden_size"], "intermediate_size": s["intermediate_size"]}
    kind = DTYPES[s["dtype"]]
    with torch.device("meta"):
        layer = LlamaMLP(LlamaConfig(**sizes, hidden_act=act)).to(kind)
    x = _randn(s.get("B") or s["bsz"], s["T"], s["hidden_size"], dtype=kind, grad=True)

    def forward(module: nn.Module, x: Tensor) -> None:
        module(x)

    def backward(module: nn.Module, x: Tensor) -> None:
        gradient = torch.randn_like(x)
        y = module(x)
        for _ in range(2):
            y.backward(gradient, retain_graph=True)

    def both(module: nn.Module, x: Tensor) -> None:
        def full() -> None:
            y = module(x)
            y.backward(torch.randn_like(y), retain_graph=True)

        full()
        full()

    step = {"forward": forward, "backward": backward, "full": both}[mode]
    # Backward has run before forward alone is measured: its thread keeps a workspace.
    return Made(step, (layer, x), workspaces=int(mode == "forward"))


class Rotary(nn.Module):
    """transformers' rotary embedding of queries and keys."""

    def __init__(self, size: int, s: Sizes) -> None:
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        with torch.device("meta"):
            config = LlamaConfig(num_attention_heads=s["num_q_heads"], head_dim=size)
            self.angles = LlamaRotaryEmbedding(config)

    def forward(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        return apply_rotary_pos_emb(q, k, *angles)


class ComplexRotary(nn.Module):
    """That of Llama 4, by complex numbers."""

    def __init__(self, size: int, s: Sizes) -> None:
        from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
        from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding

        super().__init__()
        config = Llama4TextConfig(
            hidden_size=size * s["num_q_heads"],
            num_attention_heads=s["num_q_heads"],
            num_key_value_heads=s["num_kv_heads"],
            head_dim=size,
        )
        with torch.device("meta"):
            self.angles = Llama4TextRotaryEmbedding(config)

    def forward(self, q: Tensor, k: Tensor, angles: Tensor) -> Any:
        from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

        return apply_rotary_emb(q, k, angles)


def _rope(module: type[nn.Module], s: Sizes, heads_first: bool) -> Made:
    """Gradients of queries and keys as results, not kept.

    The transformers of the measurements made the angles by a product, which left a workspace of
    BLAS; newer ones multiply.
    """
    width, length = s.get("hidden_size") or s["H"], s.get("seq_len") or s["T"]
    size = width // s["num_q_heads"]
    kind = DTYPES[s["dtype"]]
    queries = _randn(1, length, s["num_q_heads"], size, dtype=kind, grad=True)
    keys = _randn(1, length, s["num_kv_heads"], size, dtype=kind, grad=True)
    places = torch.zeros(1, length, dtype=torch.long, device="meta")

    def step(module: nn.Module, queries: Tensor, keys: Tensor, places: Tensor) -> None:
        q, k = queries, keys
        if heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        dq, dk = torch.randn_like(q), torch.randn_like(k)
        angles = module.angles(k, places)

        def full() -> None:
            made = module(q, k, angles)
            torch.autograd.grad(made, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

        full()
        full()

    return Made(step, (module(size, s), queries, keys, places), workspaces=1)


class Neighbours(nn.Module):
    """Attention written out, with a mask of neighbours.  The mask is made in one go, where the
    measured one was filled element by element."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        width, kind = s["hidden_size"], DTYPES[s["dtype"]]
        self.heads = s["num_heads"]
        self.scale = 1.0 / math.sqrt(width // self.heads)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(width, width, dtype=kind, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query = query.view(shape).transpose(1, 2)
        key = key.view(shape).transpose(1, 2)
        value = value.view(shape).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale
        mask = torch.zeros(length, length, device=x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        output = torch.matmul(weights, value)
        output = output.transpose(1, 2).contiguous().view(batch, length, width)
        return self.out_proj(output)


def fused_neighborhood_attention(s: Sizes) -> Made:
    """Liger's module has as many weights, on the device, too."""
    width, kind = s["hidden_size"], DTYPES[s["dtype"]]
    x = _randn(s["batch_size"], s["seq_len"], width, dtype=kind, grad=True)
    beside = 4 * (width * width + width) * kind.itemsize
    return Made(_twice, (Neighbours(s), x, x.detach().clone()), beside)


class TokenMixing(nn.Module):
    """A convolution over attention weights, masked before and after."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        kind, window = DTYPES[s["dtype"]], s["K"]
        shape = (s["C_out"], s["C_in"] // s["groups"], window, window)
        self.weight = nn.Parameter(_randn(*shape, dtype=kind))
        self.bias = nn.Parameter(_randn(s["C_out"], dtype=kind))
        self.window, self.groups = window, s["groups"]

    def forward(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        ones = torch.ones(length, length, dtype=torch.bool, device=scores.device)
        mask = torch.tril(ones).view(1, 1, length, length)
        low = torch.full((), -1e9, device=scores.device, dtype=scores.dtype)
        zero = torch.zeros((), device=scores.device, dtype=scores.dtype)
        masked = scores.masked_fill(~mask, low)
        probabilities = F.softmax(masked, dim=-1)
        mixed = F.conv2d(
            probabilities, self.weight, self.bias, padding=self.window // 2, groups=self.groups
        )
        return mixed.masked_fill(~mask, zero)


def multi_token_attention(s: Sizes) -> Made:
    """Scores [B, C, L, L]."""
    x = _randn(s["B"], s["C_in"], s["L"], s["L"], dtype=DTYPES[s["dtype"]], grad=True)
    return Made(_twice, (TokenMixing(s), x, x.detach().clone()))


class Sparsemax(nn.Module):
    """The projection onto the simplex, by sorting."""

    def forward(self, x: Tensor) -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        size = x.size(-1)
        count = torch.arange(1, size + 1, device=x.device, dtype=x.dtype).view(1, size)
        bound = 1 + count * ordered
        support = bound > sums
        k = support.sum(dim=-1, keepdim=True).clamp(min=1)
        total = (ordered * support).sum(dim=-1, keepdim=True)
        tau = (total - 1) / k
        return torch.clamp(x - tau, min=0)


def sparsemax(s: Sizes) -> Made:
    """Rows of fp32."""
    x = _randn(s["B"] * s["T"], s["V"], grad=True)
    return Made(_twice, (Sparsemax(), x, x.detach().clone()))


BUILDERS: dict[str, Callable[[Sizes], Made]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "megatron_rms_norm": megatron_rms_norm,
    "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_jsd": fused_linear_jsd,
    "kl_div": _of_distributions(nn.KLDivLoss(reduction="batchmean"), "log_softmax"),
    "jsd": _of_distributions(Divergence(), "log_softmax"),
    "tvd": _of_distributions(Variation(), "softmax"),
    "rope": lambda s: _rope(Rotary, s, heads_first=True),
    "llama4_rope": lambda s: _rope(ComplexRotary, s, heads_first=False),
    "fused_neighborhood_attention": fused_neighborhood_attention,
    "multi_token_attention": multi_token_attention,
    "sparsemax": sparsemax,
}
GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}


def made(kernel: str, sizes: Sizes, mode: str) -> Made:
    """The step of a row."""
    for name, act in GATES.items():
        if kernel in (name, f"tiled_{name}"):
            return mlp(sizes, act, mode)
    return BUILDERS[kernel](sizes)
