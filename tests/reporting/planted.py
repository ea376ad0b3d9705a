"""Findings, each planted in a small model, and the same model mended by hand.

A pair has a module with the finding and one without it, their inputs, and how both are run.  On a
GPU that is:

    from tests.reporting.planted import PAIRS
    for pair in PAIRS:
        for way in (pair.planted, pair.mended):
            step = way.step("cuda")  # a function without arguments; 5 to 50 ms on an H100
            ...                      # call it 10 times, then time 50 calls between two events

The line of the finding ends with a comment, "planted: <name>".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HALF = torch.bfloat16
CHIP = "h100-sxm"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One side of a pair: a module, its inputs, and how it is run.

    make, inputs: called under a default device.  phase: forward or training (a unit gradient into
    the output, no optimizer, unless `train` steps itself).  train: a whole step of its own.
    execution: the preset and what it changes; tf32 also sets the switches of torch.  graph: whether
    the step is one CUDA graph.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    phase: str = "forward"
    train: Callable[..., Any] | None = None
    execution: Mapping[str, Any] = field(default_factory=dict)

    def built(self, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its inputs on a device."""
        with torch.device(device):
            return self.make(), self.inputs()

    def step(self, device: str) -> Callable[[], Any]:
        """The step as a function without arguments."""
        torch.backends.cuda.matmul.allow_tf32 = bool(self.execution.get("tf32"))
        torch.backends.cudnn.allow_tf32 = bool(self.execution.get("tf32"))
        module, inputs = self.built(device)
        if self.train is not None:
            optimizer = optimizer_of(module, self.train)
            return lambda: self.train(module, optimizer, *inputs)  # type: ignore[misc]
        if self.phase == "training":

            def both() -> None:
                module.zero_grad()
                out = module(*inputs)
                out.backward(torch.ones_like(out))

            return both
        module.requires_grad_(False)
        if self.execution.get("dispatch") != "graph":
            return lambda: module(*inputs)
        module(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(*inputs)
        return graph.replay


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A finding.  lever: of the what-if that has to name it; said: a word of its action."""

    name: str
    lever: str
    said: str
    planted: Way
    mended: Way

    @property
    def line(self) -> str:
        """The line of the finding, "planted.py:12"."""
        for number, text in enumerate(inspect.getsource(inspect.getmodule(Pair)).splitlines(), 1):
            if text.endswith(f"# planted: {self.name}"):
                return f"planted.py:{number}"
        raise LookupError(f"no line ends with {self.name!r}")


def normal(*shape: int, dtype: torch.dtype = HALF) -> Callable[[], tuple[Tensor, ...]]:
    """One input of random numbers."""
    return lambda: (torch.randn(shape).to(dtype),)


# -- an attention whose width is not innermost -----------------------------------------------------


class Pixels(nn.Module):
    """Attention over pixels, from one product for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(512, 1536, 1), nn.Conv2d(512, 512, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)  # planted: width

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x).reshape(x.shape[0], 3, 8, 64, -1).transpose(-1, -2).unbind(1)
        return x + self.out(self.attend(*rows).transpose(-1, -2).reshape(x.shape))


class PixelsMended(Pixels):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (query.contiguous(), key.contiguous(), value.contiguous())
        return F.scaled_dot_product_attention(*rows)


class Widths(nn.Module):
    """Attention with a bias, whose heads are 20 wide, by several layers of one line."""

    padded = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 480) for _ in range(3))
        self.register_buffer("bias", torch.zeros(1, 8, 720, 720, dtype=HALF))

    def attend(self, *rows: Tensor) -> Tensor:
        if self.padded:
            query, key, value = (F.pad(t, (0, 4)) for t in rows)
            out = F.scaled_dot_product_attention(query, key, value, self.bias, scale=20**-0.5)
            return out[..., :20]
        return F.scaled_dot_product_attention(*rows, self.bias)  # planted: odd

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(x).unflatten(-1, (3, 8, 20)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(*rows).transpose(1, 2).flatten(2)
        return x


class WidthsMended(Widths):
    padded = True


# -- convolutions of channels first ----------------------------------------------------------------


class Blocks(nn.Module):
    """Residual convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = x + layer(x).relu()  # planted: channels_last
        return x


# -- products --------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Two wide products."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Wide(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # planted: precision


class Exact(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # planted: tf32


class Head(nn.Module):
    """The logits of a vocabulary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(2048, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # planted: vocabulary


# -- an optimizer step of many small kernels -------------------------------------------------------


def optimizer_of(module: nn.Module, train: Callable[..., Any]) -> torch.optim.Optimizer:
    """The optimizer that a step of its own takes."""
    fused, trained = train is not many_step, getattr(module, "student", module)
    return torch.optim.AdamW(trained.parameters(), lr=1e-4, foreach=not fused, fused=fused)


def many_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()  # planted: optimizer


def fused_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()


def looped_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    gradients_of(module, x)
    for weight in module.parameters():
        weight.grad.div_(8)  # planted: lists
    optimizer.step()


def listed_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    gradients_of(module, x)
    torch._foreach_div_([weight.grad for weight in module.parameters()], 8)
    optimizer.step()


def gradients_of(module: nn.Module, x: Tensor) -> None:
    """Gradients of a step, from none."""
    module.zero_grad()
    module(x).sum().backward()


def perceptrons() -> nn.Module:
    return nn.Sequential(*[Perceptron(2048) for _ in range(8)])


# -- what the host and its launches do -------------------------------------------------------------


class WrittenGelu(nn.Module):
    """GELU as its formula says it, an operation each."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)  # planted: fusion
        return 0.5 * x * (1 + torch.tanh(inner))


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class SpelledGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))  # planted: activation
        return x * 0.5 * (1.0 + torch.tanh(inner))


class Activated(nn.Module):
    def __init__(self, act: Callable[[], nn.Module] = SpelledGelu) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(1024, 4096), act(), nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Small(nn.Module):
    """Many layers that take a GPU less time than their launch takes the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(400))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()  # planted: launch
        return x


class Asking(nn.Module):
    """Layers, each of which asks the device for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(200))

    def scale(self, x: Tensor) -> Any:
        return x.abs().amax().item()  # planted: wait

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x / self.scale(x)).relu()
        return x


class AskingMended(Asking):
    def scale(self, x: Tensor) -> Any:
        return x.abs().amax()


# -- copies ----------------------------------------------------------------------------------------


class Turned(nn.Module):
    """A mean over one and the same sequence in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4096, dtype=HALF))

    def turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()  # planted: copy

    def forward(self, x: Tensor) -> Tensor:
        return (self.turned(x) * 2).sum(-1) * self.gate


class TurnedMended(Turned):
    def turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Grouped(nn.Module):
    """Attention whose heads share keys and values, which are copied for each."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(8, 1) for t in (key, value))  # planted: heads
        return F.scaled_dot_product_attention(query, key, value)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(query, key, value)


class GroupedMended(Grouped):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


# -- attention that is written out -----------------------------------------------------------------


class Written(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) / math.sqrt(128)
        return torch.softmax(scores, -1) @ value  # planted: attention


class WrittenMended(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Turning(nn.Module):
    """Attention after an embedding of positions in fp32, which leaves its operands in fp32."""

    narrow = False

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)
        self.register_buffer("turn", torch.ones(1024, 64))

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        turn = self.turn.float()
        return torch.cat((first * turn - second, first + second * turn), -1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self.turned(query), self.turned(key), value.float()
        return F.scaled_dot_product_attention(query, key, value)  # planted: widened

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x).unflatten(-1, (3, 8, 128)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*rows).transpose(1, 2).flatten(2).to(x.dtype))


class TurningMended(Turning):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = self.turned(query).to(value.dtype), self.turned(key).to(value.dtype)
        return F.scaled_dot_product_attention(query, key, value)


# -- numbers that are made again, or wider than the rest -------------------------------------------


class Windows(nn.Module):
    """Layers, each of which makes the mask of attention to near tokens for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1536) for _ in range(4))

    def mask(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        far = (at[:, None] - at).abs() > 512
        rows = torch.zeros(x.shape[0], 1, *far.shape, dtype=x.dtype, device=x.device)
        return rows.masked_fill(far, float("-inf"))  # planted: repeated

    def shared(self, x: Tensor) -> Tensor | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared(x)
        for layer in self.layers:
            mask = self.mask(x) if shared is None else shared
            rows = layer(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(*rows, mask).transpose(1, 2).flatten(2)
        return x


class WindowsMended(Windows):
    def shared(self, x: Tensor) -> Tensor | None:
        return self.mask(x)


class Messages(nn.Module):
    """Sums over the neighbours of nodes, in 64 bits as the degrees came from NumPy."""

    wide = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.register_buffer("degrees", torch.ones(100_000, 1, dtype=self.wide))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            sums = torch.zeros_like(x, dtype=self.wide)
            sums.index_add_(0, target, layer(x)[source].to(self.wide))  # planted: doubles
            x = (sums / self.degrees).relu().float()
        return x


class MessagesMended(Messages):
    wide = torch.float32


def edges() -> tuple[Tensor, ...]:
    """100,000 nodes of 256 numbers, and a million edges between them."""
    source, target = (torch.randint(0, 100_000, (1_000_000,)) for _ in range(2))
    return torch.randn(100_000, 256), source, target


def heads(keys: int, rows: int = 4096, queries: int | None = None) -> Any:
    """Query, key and value of 16 sequences."""
    shape = (16, 32, queries or rows, 128), (16, keys, rows, 128), (16, keys, rows, 128)
    return lambda: tuple(torch.randn(size).to(HALF) for size in shape)


class Codec(nn.Module):
    """Wide products whose weights stay in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(8192, 8192)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight.to(x.dtype)).relu()  # planted: cast
        return x


class Masks(nn.Module):
    """Convolutions of so many channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        how = {"kernel_size": 3, "padding": 1, "bias": False}
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, **how) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()  # planted: channels
        return x


def last(module: nn.Module) -> nn.Module:
    """A module in bf16 with channels last."""
    return module.to(HALF).to(memory_format=torch.channels_last)


def images(channels: int) -> Callable[[], tuple[Tensor, ...]]:
    """Images in bf16 with channels last."""
    return lambda: (
        torch.randn(32, channels, 100, 100).to(HALF).to(memory_format=torch.channels_last),
    )


class Parts(nn.Module):
    """A convolution of each part of the channels, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 256, 1)
        self.parts = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.first(x).chunk(8, 1)
        pairs = zip(pieces, self.parts, strict=True)
        made = [F.conv2d(p, c.weight, c.bias, padding=1) for p, c in pairs]  # planted: groups
        return torch.cat(made, 1)


class PartsMended(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(64, 256, 1), nn.Conv2d(256, 256, 3, padding=1, groups=8))


class Items(nn.Module):
    """A product for each sequence of a batch."""

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([a @ b.T for a, b in zip(x, y, strict=True)])  # planted: loop

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scores(x, y)


class ItemsMended(Items):
    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.transpose(1, 2)


class Cells(nn.Module):
    """A cell of an LSTM for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(256, 512)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 512)
        states = []
        for step in x:
            h, c = self.cell(step, (h, c))  # planted: steps
            states.append(h)
        return torch.stack(states)


class CellsMended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(256, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Hot(nn.Module):
    """A table that is multiplied with rows of one 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(8192, 1024, bias=False)

    def forward(self, at: Tensor) -> Tensor:
        return self.table(F.one_hot(at, 8192).to(self.table.weight.dtype))  # planted: lookup


class Scaled(nn.Module):
    """Products, each of which a buffer in fp32 makes fp32."""

    def __init__(self, wide: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(4)).to(HALF)
        self.register_buffer("scale", torch.ones(2048, dtype=torch.float32 if wide else HALF))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x.to(HALF)) * self.scale)  # planted: promoted
        return x


class Divided(nn.Module):
    """Products with weights that each step divides by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8192, 8192))

    def divided(self) -> Tensor:
        return self.weight / self.weight.norm(dim=1, keepdim=True)  # planted: before

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.divided())


class DividedMended(Divided):
    def divided(self) -> Tensor:
        return self.weight


class Rms(nn.Module):
    """A norm spelled in fp32, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2048))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)  # planted: named
        return self.weight * wide.to(x.dtype)


class RmsNamed(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (2048,), self.weight, 1e-6)


class Normal(nn.Module):
    """Residual blocks before which rows are normed."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


# -- results that are not read, and inputs that grow ----------------------------------------------


class Cached(nn.Module):
    """One more token, whose key and value make a cache longer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2048, 6144)

    def grown(self, cache: Tensor, new: Tensor) -> Tensor:
        return torch.cat([cache, new], 2)  # planted: room

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.qkv(x).unflatten(-1, (3, 16, 128)).permute(2, 0, 3, 1, 4)
        keys, values = self.grown(keys, key), self.grown(values, value)
        return F.scaled_dot_product_attention(query, keys, values), keys, values


class CachedMended(Cached):
    def grown(self, cache: Tensor, new: Tensor) -> Tensor:
        cache[:, :, -1:] = new
        return cache


def caches(rows: int) -> Callable[[], tuple[Tensor, ...]]:
    """One token of 32 sequences, and their keys and values."""
    shapes = (32, 1, 2048), (32, 16, rows, 128), (32, 16, rows, 128)
    return lambda: tuple(torch.randn(shape).to(HALF) for shape in shapes)


class Sampled(nn.Module):
    """The most likely words of a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1024, 32000, bias=False)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        shares, words = torch.sort(logits, dim=-1, descending=True)  # planted: sort
        return shares[:, :50], words[:, :50]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.best(self.head(x))


class SampledMended(Sampled):
    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits, 50)


class Last(nn.Module):
    """The next word, from logits of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1024, 50000, bias=False)

    def last(self, x: Tensor) -> Tensor:
        return self.head(x)[:, -1]  # planted: position

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).argmax(-1)


class LastMended(Last):
    def last(self, x: Tensor) -> Tensor:
        return self.head(x[:, -1])


class Again(nn.Module):
    """Layers that run again in backward, although there is room for what they make."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        how: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        layers = (nn.TransformerEncoderLayer(1024, 16, 4096, **how) for _ in range(3))
        self.layers, self.again = nn.ModuleList(layers), again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.again:
                x = checkpoint(layer, x, use_reentrant=False)  # planted: checkpoints
            else:
                x = layer(x)
        return x


class Conditioned(nn.Module):
    """The time of a sample, expanded over its positions before two layers of it."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.mix, self.first, self.second = (nn.Linear(512, 512) for _ in range(3))
        self.late = late

    def timed(self, t: Tensor) -> Tensor:
        return self.second(F.silu(self.first(t)))  # planted: spread

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = t[:, None]
        return self.mix(x) * (self.timed(t) if self.late else self.timed(t.expand(x.shape)))


class Taught(nn.Module):
    """A student and its teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))) for _ in range(2)
        )


def taught_step(module: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(module.student(x), module.teacher(x)).backward()  # planted: unread
    optimizer.step()


def spared_step(module: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    with torch.no_grad():
        aim = module.teacher(x)
    F.mse_loss(module.student(x), aim).backward()
    optimizer.step()


class Framed(nn.Module):
    """The strength of frames of a sound, which are cut one by one."""

    def frames(self, x: Tensor) -> Tensor:
        parts = [x[:, at : at + 400] for at in range(0, x.shape[1] - 399, 160)]
        return torch.stack(parts, 1)  # planted: frames

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.frames(x) * 0.5).abs()


class FramedMended(Framed):
    def frames(self, x: Tensor) -> Tensor:
        return x.unfold(-1, 400, 160)


class Growing(nn.Module):
    """States of a loop, joined in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        out = x[:, None]
        for _ in range(24):
            x = F.silu(self.step(x))
            out = torch.cat([out, x[:, None]], 1)  # planted: joins
        return out


class GrowingMended(Growing):
    def forward(self, x: Tensor) -> Tensor:
        out = [x[:, None]]
        for _ in range(24):
            x = F.silu(self.step(x))
            out.append(x[:, None])
        return torch.cat(out, 1)


class Normed(nn.Module):
    """Norms between casts, as CLIP has them."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(1024) for _ in range(4))
        self.wide = wide

    def norm(self, norm: Any, x: Tensor) -> Tensor:
        how = norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
        return F.layer_norm(x.float(), *how).to(x.dtype)  # planted: norms

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.norms:
            x = F.gelu(self.norm(layer, x) if self.wide else layer(x))
        return x


def half(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(HALF)


def _same(name: str, lever: str, said: str, way: Way, **mended: Any) -> Pair:
    """A pair whose sides differ in these fields alone."""
    from dataclasses import replace

    return Pair(name=name, lever=lever, said=said, planted=way, mended=replace(way, **mended))


ROWS = normal(8192, 4096, dtype=torch.float32)
PAIRS = (
    _same(
        "width",
        "layout",
        "innermost",
        Way(make=half(Pixels), inputs=normal(32, 512, 32, 32), phase="training"),
        make=half(PixelsMended),
    ),
    _same(
        "odd",
        "layout",
        "Pad heads",
        Way(make=half(Widths), inputs=normal(32, 720, 160), phase="training"),
        make=half(WidthsMended),
    ),
    _same(
        "channels_last",
        "layout",
        "channels last",
        Way(make=half(Blocks), inputs=normal(256, 256, 56, 56)),
        make=lambda: Blocks().to(HALF).to(memory_format=torch.channels_last),
        inputs=lambda: (
            torch.randn(256, 256, 56, 56).to(HALF).to(memory_format=torch.channels_last),
        ),
    ),
    _same(
        "precision",
        "compute",
        "in bf16 what",
        Way(make=Wide, inputs=ROWS),
        make=half(Wide),
        inputs=normal(8192, 4096),
    ),
    _same("tf32", "compute", "TF32", Way(make=Exact, inputs=ROWS), execution={"tf32": True}),
    _same(
        "vocabulary",
        "padding",
        "50,264",
        Way(make=half(lambda: Head(50257)), inputs=normal(8192, 2048)),
        make=half(lambda: Head(50264)),
    ),
    _same(
        "optimizer",
        "optimizer",
        "fused",
        Way(make=perceptrons, inputs=normal(64, 2048, dtype=torch.float32), train=many_step),
        train=fused_step,
    ),
    _same(
        "fusion",
        "fusion",
        "Compile",
        Way(make=WrittenGelu, inputs=normal(16384, 32768)),
        make=Gelu,
    ),
    _same(
        "launch",
        "launch",
        "CUDA graph",
        Way(make=half(Small), inputs=normal(64, 512)),
        execution={"dispatch": "graph"},
    ),
    _same(
        "wait",
        "wait",
        "item",
        Way(make=half(Asking), inputs=normal(4096, 1024)),
        make=half(AskingMended),
    ),
    _same(
        "copy",
        "copy",
        "Leave out copies",
        Way(make=Turned, inputs=normal(128, 4096, 4096)),
        make=TurnedMended,
    ),
    _same(
        "heads",
        "rewrite",
        "without a copy",
        Way(make=Grouped, inputs=heads(4, 16384, 16)),
        make=GroupedMended,
    ),
    _same(
        "attention",
        "rewrite",
        "one kernel",
        Way(make=Written, inputs=heads(32)),
        make=WrittenMended,
    ),
    _same(
        "repeated",
        "rewrite",
        "Compute once",
        Way(make=half(Windows), inputs=normal(32, 2048, 512), phase="training"),
        make=half(WindowsMended),
    ),
    _same("doubles", "compute", "fp64", Way(make=Messages, inputs=edges), make=MessagesMended),
    _same(
        "cast",
        "copy",
        "as each step casts them",
        Way(make=Codec, inputs=normal(256, 8192)),
        make=half(Codec),
    ),
    _same(
        "channels",
        "padding",
        "Pad 100 to 104",
        Way(make=lambda: last(Masks(100)), inputs=images(100)),
        make=lambda: last(Masks(104)),
        inputs=images(104),
    ),
    _same(
        "loop",
        "rewrite",
        "equal calls",
        Way(make=Items, inputs=lambda: tuple(torch.randn(64, 256, 512).to(HALF) for _ in range(2))),
        make=ItemsMended,
    ),
    _same(
        "groups",
        "rewrite",
        "groups=",
        Way(make=lambda: last(Parts()), inputs=images(64), phase="training"),
        make=lambda: last(PartsMended()),
    ),
    _same(
        "steps",
        "rewrite",
        "all steps",
        Way(make=half(Cells), inputs=normal(24, 32, 256)),
        make=half(CellsMended),
    ),
    _same(
        "lookup",
        "rewrite",
        "Look rows up",
        Way(make=half(Hot), inputs=lambda: (torch.randint(0, 8192, (65536,)),)),
        make=half(lambda: nn.Embedding(8192, 1024)),
    ),
    _same(
        "promoted",
        "compute",
        "Keep in bf16",
        Way(make=Scaled, inputs=normal(16384, 2048)),
        make=lambda: Scaled(wide=False),
    ),
    _same(
        "before",
        "rewrite",
        "Make once",
        Way(make=half(Divided), inputs=normal(256, 8192)),
        make=half(DividedMended),
    ),
    _same(
        "lists",
        "rewrite",
        "in one call",
        Way(make=half(perceptrons), inputs=normal(64, 2048), train=looped_step),
        train=listed_step,
    ),
    _same(
        "room",
        "rewrite",
        "have room",
        Way(make=half(Cached), inputs=caches(4095)),
        make=half(CachedMended),
        inputs=caches(4096),
    ),
    _same(
        "sort",
        "rewrite",
        "topk",
        Way(make=half(Sampled), inputs=normal(256, 1024)),
        make=half(SampledMended),
    ),
    _same(
        "position",
        "rewrite",
        "one position",
        Way(make=half(Last), inputs=normal(8, 1024, 1024)),
        make=half(LastMended),
    ),
    _same(
        "checkpoints",
        "memory",
        "Leave out checkpoints",
        Way(make=half(lambda: Again(True)), inputs=normal(8, 1024, 1024), phase="training"),
        make=half(lambda: Again(False)),
    ),
    _same(
        "spread",
        "rewrite",
        "before they are repeated",
        Way(
            make=half(lambda: Conditioned(False)),
            inputs=lambda: (torch.randn(32, 1024, 512).to(HALF), torch.randn(32, 512).to(HALF)),
            phase="training",
        ),
        make=half(lambda: Conditioned(True)),
    ),
    _same(
        "unread",
        "rewrite",
        "that no optimizer reads",
        Way(make=half(Taught), inputs=normal(8192, 1024), train=taught_step),
        train=spared_step,
    ),
    _same(
        "joins",
        "rewrite",
        "once, after it",
        Way(make=half(Growing), inputs=normal(4096, 1024)),
        make=half(GrowingMended),
    ),
    _same(
        "widened",
        "compute",
        "Attend in bf16",
        Way(make=half(Turning), inputs=normal(8, 1024, 1024), phase="training"),
        make=half(TurningMended),
    ),
    _same(
        "named",
        "rewrite",
        "F.rms_norm",
        Way(make=half(lambda: Normal(Rms)), inputs=normal(8, 1024, 2048), phase="training"),
        make=half(lambda: Normal(RmsNamed)),
    ),
    _same(
        "activation",
        "rewrite",
        "F.gelu(approximate='tanh')",
        Way(make=half(Activated), inputs=normal(8, 1024, 1024), phase="training"),
        make=half(lambda: Activated(Gelu)),
    ),
    _same(
        "frames",
        "rewrite",
        "unfold",
        Way(make=Framed, inputs=normal(32, 80000, dtype=torch.float32)),
        make=FramedMended,
    ),
    _same(
        "norms",
        "compute",
        "Take norms of bf16",
        Way(make=half(lambda: Normed(True)), inputs=normal(16384, 1024), phase="training"),
        make=half(lambda: Normed(False)),
    ),
)
