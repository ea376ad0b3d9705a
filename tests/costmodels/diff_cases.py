"""Revisions of a small language model: what changed, the line, and the words of the cause.

Each case is one commit on the base below.  The changed line ends in "# here"; where a line is gone,
the line of the base does.  Most are changes that real model libraries have made.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

NORMS = """
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * self.weight
"""

NET = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from norms import Norm

WIDTH, HEADS, KV_HEADS, VOCABULARY, LAYERS = 256, 8, 8, 1009, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)
        k = self.k(x).view(b, s, KV_HEADS, -1).transpose(1, 2)
        v = self.v(x).view(b, s, KV_HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=HEADS != KV_HEADS)
        return self.o(y.transpose(1, 2).reshape(b, s, WIDTH))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        gate = F.silu(self.gate(x))
        y = gate * self.up(x)
        return self.down(y)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build():
    model = Net().to(torch.bfloat16)
    return model, torch.zeros(2, 512, dtype=torch.long)
"""


@dataclass(frozen=True)
class Case:
    """A commit: replacements in the two files, and what the first row has to say."""

    name: str
    edits: tuple[tuple[str, str], ...]
    says: tuple[str, ...]
    module: str  # the first of the row's modules
    phase: str = "forward"
    base: tuple[tuple[str, str], ...] = ()  # done on both sides

    def sources(self) -> tuple[dict[str, str], dict[str, str]]:
        """Text by file of the revision before and of the one after."""
        before = {"norms.py": NORMS, "net.py": NET}
        for old, new in self.base:
            before = _replaced(before, old, new)
        after = dict(before)
        for old, new in self.edits:
            after = _replaced(after, old, new)
        return before, after

    def write(self, folder: Path) -> tuple[str, str, str]:
        """The targets of the two revisions, and the line that the cause has to name.

        A revision of many cases is one target.
        """
        targets, line = [], ""
        for files in self.sources():
            place = folder / hashlib.sha256(repr(files).encode()).hexdigest()[:16]
            place.mkdir(exist_ok=True)
            for file, text in files.items():
                (place / file).write_text(text)
                for number, each in enumerate(text.splitlines(), 1):
                    if each.endswith("# here"):
                        line = f"{file}:{number}"
            targets.append(f"{place / 'net.py'}:build")
        return targets[0], targets[1], line


def _replaced(files: dict[str, str], old: str, new: str) -> dict[str, str]:
    assert any(old in text for text in files.values()), old
    return {name: text.replace(old, new) for name, text in files.items()}


_SDPA = (
    "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, "
    "enable_gqa=HEADS != KV_HEADS)\n"
)
_BY_HAND = """        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        scores = q @ k.transpose(-1, -2) / 8
        y = scores.masked_fill(~mask, -1e9).softmax(-1) @ v
"""

CASES = (
    # -- the six of the issue that this was built for --
    Case(
        "norm to fp32",
        (
            (
                "        y = x * torch",
                "        x, dtype = x.float(), x.dtype  # here\n        y = x * torch",
            ),
            ("return y * self.weight", "return y.to(dtype) * self.weight"),
        ),
        ("cast bf16 -> fp32 by float()", "cast fp32 -> bf16 by to()"),
        "layers.*.norm1",
    ),
    Case(
        "grouped queries",
        (
            (
                "HEADS, KV_HEADS, VOCABULARY, LAYERS = 256, 8, 8",
                "HEADS, KV_HEADS, VOCABULARY, LAYERS = 256, 8, 2",
            ),
            (
                "k = self.k(x).view(b, s, KV_HEADS, -1).transpose(1, 2)",
                "k = self.k(x).view(b, s, KV_HEADS, -1).transpose(1, 2)  # here",
            ),
        ),
        ("attention.k.weight", "[256, 256] -> [64, 256]", "heads of keys and values 8 -> 2"),
        "layers.*.attention.k",
    ),
    Case(
        "contiguous breaks a fusion",
        (
            (
                "        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)\n",
                "        square = x.pow(2).transpose(1, 2).contiguous()  # here\n"
                "        mean = square.mean(1, keepdim=True).transpose(1, 2)\n"
                "        y = x * torch.rsqrt(mean + 1e-6)\n",
            ),
        ),
        ("+copy by contiguous() x9", "breaks the fusion of add with pow"),
        "layers.*.norm1",
    ),
    Case(
        "fp32 head",
        (
            (
                "return self.head(self.norm(x))",
                "return F.linear(self.norm(x).float(), self.head.weight.float())  # here",
            ),
        ),
        (
            "cast bf16 -> fp32 by float()",
            "linear (mm) bf16 -> fp32, same sizes: vector engine instead of matrix",
            "66.9 TFLOP/s instead of 989",
        ),
        "",
    ),
    Case(
        "padded vocabulary",
        (
            ("LAYERS = 256, 8, 8, 1009", "LAYERS = 256, 8, 8, 1024"),
            ("return self.head(self.norm(x))", "return self.head(self.norm(x))  # here"),
        ),
        ("head.weight", "1009 is padded to 1024, a multiple of 512"),
        "head",
    ),
    Case(
        "precision",
        (
            ("Net().to(torch.bfloat16)", "Net().to(torch.float32)"),
            ("x = self.embed(tokens)", "x = self.embed(tokens)  # here"),
        ),
        ("bf16 -> fp32", "vector engine instead of matrix"),
        "embed",
    ),
    # -- ten more --
    Case(
        "attention rewritten",
        ((_BY_HAND, _SDPA.replace(")\n", ")  # here\n")),),
        ("matmul (bmm) x8", "-> scaled_dot_product_attention"),
        "layers.*.attention",
        base=((_SDPA, _BY_HAND),),
    ),
    Case(
        "norm upcasts its weight too",
        (
            (
                "return y * self.weight",
                "return (y.float() * self.weight.float()).to(x.dtype)  # here",
            ),
        ),
        ("cast bf16 -> fp32 by float()",),
        "layers.*.norm1",
    ),
    Case(
        "fused qkv",
        (
            (
                "self.q = nn.Linear(WIDTH, WIDTH, bias=False)",
                "self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)",
            ),
            (
                "        self.k = nn.Linear(WIDTH, KV_HEADS * head, bias=False)\n"
                "        self.v = nn.Linear(WIDTH, KV_HEADS * head, bias=False)\n",
                "",
            ),
            (
                "        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)\n",
                "        qkv = self.qkv(x)  # here\n"
                "        q, k, v = qkv.view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)\n",
            ),
            (
                "        k = self.k(x).view(b, s, KV_HEADS, -1).transpose(1, 2)\n"
                "        v = self.v(x).view(b, s, KV_HEADS, -1).transpose(1, 2)\n",
                "",
            ),
        ),
        ("attention.q.weight -> layers.*.attention.qkv.weight", "-linear (mm) x8"),
        "layers.*.attention.qkv",
    ),
    Case(
        "a router",
        (
            (
                "        self.up = nn.Linear",
                "        self.router = nn.Linear(WIDTH, 8, bias=False)\n"
                "        self.up = nn.Linear",
            ),
            (
                "        return self.down(y)",
                "        share = self.router(x).float().softmax(-1).amax(-1, True)  # here\n"
                "        return self.down(y) * share.to(y.dtype)",
            ),
        ),
        ("+linear (mm)", "softmax"),
        "layers.*.mlp.router",
    ),
    Case(
        "cache made static",
        (
            (
                "        k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)\n",
                "        k = self.keys.index_copy(2, torch.arange(s, device=x.device), k)  # here\n"
                "        v = self.values.index_copy(2, torch.arange(s, device=x.device), v)\n",
            ),
        ),
        ("cat", "-> ", "index_copy"),
        "layers.*.attention",
        base=(
            (
                "        self.o = nn.Linear",
                "        self.register_buffer('keys', torch.zeros(2, HEADS, 1024, head))\n"
                "        self.register_buffer('values', torch.zeros(2, HEADS, 1024, head))\n"
                "        self.o = nn.Linear",
            ),
            (
                _SDPA,
                "        k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)\n"
                + _SDPA.replace("is_causal=True, ", ""),
            ),
        ),
    ),
    Case(
        "a dropout left on",
        (
            (
                "        y = gate * self.up(x)\n",
                "        y = F.dropout(gate * self.up(x), 0.1)  # here\n",
            ),
        ),
        ("+dropout (native_dropout) x4",),
        "layers.*.mlp",
    ),
    Case(
        "an extra float",
        (
            (
                "        x = x + self.attention(self.norm1(x))",
                "        x = x + self.attention(self.norm1(x)).float().to(x.dtype)  # here",
            ),
        ),
        ("cast bf16 -> fp32 by float()", "cast fp32 -> bf16 by to()", "; fused away"),
        "layers.*",
    ),
    Case(
        "cat in a loop",
        (
            (
                "        x = self.embed(tokens)\n",
                "        x = self.embed(tokens)[:, :0]\n"
                "        for part in self.embed(tokens).split(64, 1):\n"
                "            x = torch.cat([x, part], 1)  # here\n",
            ),
        ),
        ("cat",),
        "",
    ),
    Case(
        "a wider mlp",
        (
            ("nn.Linear(WIDTH, 4 * WIDTH", "nn.Linear(WIDTH, 6 * WIDTH"),
            ("nn.Linear(4 * WIDTH, WIDTH", "nn.Linear(6 * WIDTH, WIDTH"),
            ("gate = F.silu(self.gate(x))", "gate = F.silu(self.gate(x))  # here"),
        ),
        ("mlp.gate.weight", "[1024, 256] -> [1536, 256]"),
        "layers.*.mlp.gate",
        phase="training",
    ),
    Case(
        "checkpointing",
        (
            (
                "            x = layer(x)\n",
                "            x = checkpoint(layer, x, use_reentrant=False)  # here\n",
            ),
        ),
        ("the forward of layers.* runs again in the backward (activation checkpointing)",),
        "layers.*.norm1",
        phase="training",
    ),
    Case(
        "two more layers",
        (("1009, 4\n", "1009, 6\n"), ("x = layer(x)\n", "x = layer(x)  # here\n")),
        ("layers.* 4 -> 6: layers.4 to layers.5 are new",),
        "layers.*",
        phase="training",
    ),
)

UNCHANGED = {
    "a renamed module": (("self.mlp", "self.feed_forward"),),
    "a renamed class and variable": (
        ("Mlp", "FeedForward"),
        ("gate = F", "opened = F"),
        ("y = gate", "y = opened"),
    ),
    "independent lines in another order": (
        (
            "        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)\n"
            "        k = self.k(x).view(b, s, KV_HEADS, -1).transpose(1, 2)\n",
            "        k = self.k(x).view(b, s, KV_HEADS, -1).transpose(1, 2)\n"
            "        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)\n",
        ),
    ),
    "a method pulled out": (
        (
            "        gate = F.silu(self.gate(x))\n        y = gate * self.up(x)\n",
            "        y = self.gated(x)\n",
        ),
        (
            "        return self.down(y)\n",
            "        return self.down(y)\n"
            "\n"
            "    def gated(self, x):\n"
            "        return F.silu(self.gate(x)) * self.up(x)\n",
        ),
    ),
    "factors in another order": (("gate * self.up(x)", "self.up(x) * gate"),),
    "a module split": (
        ("        y = gate * self.up(x)\n", "        y = self.product(gate, self.up(x))\n"),
        (
            "        self.gate = nn.Linear",
            "        self.product = Product()\n        self.gate = nn.Linear",
        ),
        (
            "class Mlp(",
            "class Product(nn.Module):\n"
            "    def forward(self, a, b):\n"
            "        return a * b\n"
            "\n"
            "\n"
            "class Mlp(",
        ),
    ),
    "another epsilon": (("1e-6", "1e-5"),),
}
"""Commits that keep every op and every cost."""
