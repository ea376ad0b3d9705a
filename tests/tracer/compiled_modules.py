"""Forty modules and more for torch.compile, some of which break its graph, with their inputs.

Run as a program, it prints as JSON what torch._dynamo.explain, or rooftrace, says of them:
`compiled_modules.py torch|rooftrace|traced|command [NAME ...]`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


def x(*shape: int) -> Tensor:
    return torch.ones(*(shape or (4, WIDTH)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def between(self, y: Tensor) -> Any:
        return F.gelu(y)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.between(self.up(x)))


class Encoder(nn.Module):
    """Layers with a fast path for inference, which asks for the state of autocast and of grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class Asks(Plain):
    """It asks torch for states that a recording has an answer of its own for."""

    def between(self, y: Tensor) -> Any:
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cuda"):
            return y
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return y * 2
        return y.to(torch.get_autocast_dtype("cuda")) if torch.cuda.is_available() else F.silu(y)


class Autocast(Plain):
    def between(self, y: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (y @ y.T @ y).float()


class Streams(Plain):
    def between(self, y: Tensor) -> Any:
        return y + torch.cuda.device_count()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.adaptive_avg_pool2d(self.net(x), 1).flatten(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)[0][:, -1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Dropped(Plain):
    def between(self, y: Tensor) -> Any:
        return F.dropout(y, 0.1, training=True)


class Drawn(Plain):
    def between(self, y: Tensor) -> Any:
        return y + torch.randn_like(y) * torch.rand(1)


class Containers(Plain):
    def between(self, y: Tensor) -> Any:
        kept = {"a": [y, y + 1], "b": (y * 2,)}
        return sum(t.sum() for ts in kept.values() for t in ts) * y


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Held:
    value: Tensor
    scale: float = 2.0


class Records(Plain):
    def between(self, y: Tensor) -> Any:
        pair, held = Pair(y, y + 1), Held(y)
        return pair.left * pair.right + held.value * held.scale


class Ordered(Plain):
    def between(self, y: Tensor) -> Any:
        kept = collections.OrderedDict(a=y, b=y.cos())
        kept.move_to_end("a")
        total = collections.defaultdict(list)
        for name, item in kept.items():
            total[len(name)].append(item)
        return torch.stack(total[1]).sum(0)


class Generated(Plain):
    def halves(self, y: Tensor) -> Iterator[Tensor]:
        for part in y.chunk(2, -1):
            yield part.sin()

    def between(self, y: Tensor) -> Any:
        return torch.cat(list(self.halves(y)), -1)


class Itertools(Plain):
    def between(self, y: Tensor) -> Any:
        parts = itertools.chain(y.chunk(2, -1), y.chunk(4, -1))
        return y * functools.reduce(lambda a, b: a + b.sum(), parts, torch.zeros(()))


class Partial(Plain):
    def between(self, y: Tensor) -> Any:
        return functools.partial(torch.clamp, min=0.0)(y)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.exp() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].exp() * 2


class OwnFunction(Plain):
    def between(self, y: Tensor) -> Any:
        return Scaled.apply(y)


class Vmapped(Plain):
    def between(self, y: Tensor) -> Any:
        return torch.vmap(lambda row: row * row.sum())(y)


class Differentiated(Plain):
    def between(self, y: Tensor) -> Any:
        return torch.func.grad(lambda t: t.sin().sum())(y)


class Checkpointed(Plain):
    def between(self, y: Tensor) -> Any:
        return checkpoint(F.gelu, y, use_reentrant=False)


class Conditional(Plain):
    def between(self, y: Tensor) -> Any:
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))


class Buffered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(32))

    def between(self, y: Tensor) -> Any:
        self.seen.add_(y.mean(0))
        return y + self.seen


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, y: Tensor) -> Any:
        self.calls += 1
        return y * self.calls


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda module, args, out: out * 2)


class Slices(Plain):
    def between(self, y: Tensor) -> Any:
        y = y.clone()
        y[:, ::2] = 0.0
        return y[..., torch.arange(32)]


class Maths(Plain):
    def between(self, y: Tensor) -> Any:
        return y * math.sqrt(y.shape[-1]) + math.log2(y.numel())


# -- those that break ------------------------------------------------------------------------------


class Prints(Plain):
    def between(self, y: Tensor) -> Any:
        print("between", file=sys.stderr)
        return y.cos()


class Item(Plain):
    def between(self, y: Tensor) -> Any:
        return y * y.mean().item()


class Listed(Plain):
    def between(self, y: Tensor) -> Any:
        return y * y[0].tolist()[0]


class Branches(Plain):
    def between(self, y: Tensor) -> Any:
        if y.sum() > 1e9:
            return y.sin()
        return y.cos()


class While(Plain):
    def between(self, y: Tensor) -> Any:
        while y.abs().max() > 1e9:
            y = y / 2
        return y


class Warns(Plain):
    def between(self, y: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("between", stacklevel=1)
        return y.cos()


class Twice(Plain):
    def between(self, y: Tensor) -> Any:
        print("one", file=sys.stderr)
        y = y.cos()
        print("two", file=sys.stderr)
        return y.sin()


class Timed(Plain):
    def between(self, y: Tensor) -> Any:
        began = time.perf_counter()
        y = y.cos()
        return y + (time.perf_counter() - began > 1e9)


class Draws(Plain):
    def between(self, y: Tensor) -> Any:
        return y * (1.0 if random.Random(0).random() < 2 else 2.0)


class Asked(Plain):
    def between(self, y: Tensor) -> Any:
        torch._dynamo.graph_break()
        return y.cos()


class Disabled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.between = torch.compiler.disable(lambda y: y.cos())  # this imports Dynamo


class Tries(Plain):
    def between(self, y: Tensor) -> Any:
        try:
            print("in a try", file=sys.stderr)
            y = y.cos()
        except ValueError:
            y = y.sin()
        return y


class Suppresses(Plain):
    def between(self, y: Tensor) -> Any:
        with contextlib.suppress(KeyError):
            print("in a with", file=sys.stderr)
            y = y.cos()
        return y


class Nonzero(Plain):
    def between(self, y: Tensor) -> Any:
        rows = y.sum(-1).nonzero().flatten()
        return y[rows]


class Loops(nn.Module):
    """The same line breaks in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Item() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    return BertModel(BertConfig(**sizes, num_attention_heads=2, vocab_size=64))


IDS = functools.partial(torch.zeros, 2, 8, dtype=torch.long)
SEQUENCE, IMAGE = functools.partial(x, 2, 5, WIDTH), functools.partial(x, 2, 3, 8, 8)
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    **{
        kind.__name__: (kind, x)
        for kind in (
            *(Plain, Asks, Autocast, Streams, Residual, Dropped, Drawn, Containers, Records),
            *(Ordered, Generated, Itertools, Partial, OwnFunction, Vmapped, Differentiated),
            *(Checkpointed, Conditional, Buffered, Counts, Hooked, Slices, Maths),
            *(Prints, Item, Listed, Branches, While, Warns, Twice, Timed, Draws, Asked, Disabled),
            *(Tries, Suppresses, Nonzero, Loops),
        )
    },
    **{kind.__name__: (kind, SEQUENCE) for kind in (Encoder, Recurrent, Lstm, Attention)},
    "Convolutions": (Convolutions, IMAGE),
    **{make.__name__: (make, IDS) for make in (gpt2, llama, bert)},
}


def explained(name: str) -> dict[str, Any]:
    """What torch says: graphs, breaks, and the lines of breaks that are outside of torch."""
    from torch._dynamo.utils import counters

    make, inputs = MODULES[name]
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        told = torch._dynamo.explain(make().eval())(inputs())
    lines = set()
    for reason in told.break_reasons:
        frames = [f for f in reason.user_stack if "/torch/" not in f.filename]
        if frames and reason.graph_break:
            lines.add(f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}")
    breaks = sum(counters["graph_break"].values())
    return {"graphs": told.graph_count, "breaks": breaks, "lines": sorted(lines)}


def found(name: str) -> dict[str, Any]:
    """What rooftrace says."""
    import rooftrace as rt

    make, inputs = MODULES[name]
    told = rt.graph_breaks(make(), inputs())
    causes = [row.cause for row in told.rows if row.cause.kind == "break"]
    lines = {cause.source.rpartition("/")[2] for cause in causes}
    return {"graphs": told.graphs, "breaks": told.graph_breaks, "lines": sorted(lines)}


def after_a_trace(name: str) -> dict[str, Any]:
    """What torch says in a process that has traced the module."""
    import rooftrace as rt

    make, inputs = MODULES[name]
    rt.trace(make(), inputs())
    return explained(name)


def after_a_command(name: str) -> dict[str, Any]:
    """What torch says in a process of the command line that has traced a step of training."""
    import rooftrace as rt
    from rooftrace._processes import ONE_TASK

    ONE_TASK.append(name)
    rt.trace(nn.Linear(4, 4), torch.ones(2, 4), phase="training")
    marked = torch.compiler.disable(lambda x: x + 1)
    assert len(ONE_TASK) > 1 or "torch._dynamo.eval_frame" not in sys.modules
    assert marked(1) == 2
    made = torch._dynamo.explain(lambda x: marked(x * 2) * 3)(torch.ones(2))
    assert (made.graph_count, made.graph_break_count) == (2, 1), made
    return after_a_trace(name)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    assert sys.argv[1] == "torch" or "torch._dynamo" not in sys.modules
    asks = {"torch": explained, "rooftrace": found, "traced": after_a_trace}
    ask = {**asks, "command": after_a_command}[sys.argv[1]]
    for name in sys.argv[2:] or MODULES:
        print(json.dumps({name: ask(name)}), flush=True)
