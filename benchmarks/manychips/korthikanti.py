"""Published steps of Megatron-LM on A100 beside our prediction: python korthikanti.py FOLDER

FOLDER/korthikanti.csv (Korthikanti et al., arXiv:2205.05198, table 5): model, tp, pp, interleave,
global_batch, micro_batch, recompute (full: layers; attn_only: scores, softmax, dropout and the
product with values), sp (whether "tp" shares sequences), seconds.

Nothing was fitted to these rows: exchanges are those of dgx-a100, kernels those of eager steps
but for what Megatron-LM has fused itself.
Attention is made of products and one kernel for scale, mask and softmax, as in Megatron-LM of 2022;
bias and GELU are one kernel there, as are bias, dropout and sum: biases of these are left out.
"""

from __future__ import annotations

import csv
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron import Update, microbatch, update
from megatron_ops import (
    Column,
    CrossEntropy,
    Embedding,
    Head,
    Row,
    accumulate,
    added_up,
    gather,
    size_of,
    weight,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.costmodels.timing import StageCost, pipelined
from rooftrace.hardware.systems import load_system

SYSTEM = load_system("dgx-a100")
SIZES = {"megatron-22B": (6144, 64, 48), "turing-530B": (20480, 128, 105)}
"""Width, heads, layers."""
SEQ, WORDS, DROPOUT = 2048, 51200, 0.1


class WholeColumn(torch.autograd.Function):
    """`Column` where all processes have whole sequences."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Any, group: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w, ctx.group = w, group
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx = added_up(grads[0] @ ctx.w, ctx.group)
        accumulate(ctx.w, grads[0], *ctx.saved_tensors)
        return dx, None, None


class WholeRow(torch.autograd.Function):
    """`Row` where all processes have whole sequences."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Any, group: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return added_up(x @ w.t(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        accumulate(ctx.w, grads[0], *ctx.saved_tensors)
        return grads[0] @ ctx.w, None, None


class Moved(torch.autograd.Function):
    """Rows as one function moves them among processes; their gradients as another does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any, group: Any) -> Tensor:
        ctx.back = partial(back, group=group)
        return there(x, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None, None


class Softmax(torch.autograd.Function):
    """Softmax of rows; its backward is one kernel, too (scaled_upper_triang_masked_softmax.h)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.softmax(x, -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @torch.compile
    def back(grad: Tensor, out: Tensor) -> Tensor:
        return (grad - (grad * out).sum(-1, keepdim=True)) * out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Softmax.back(grads[0], *ctx.saved_tensors)


def mixed(heads: Tensor) -> Tensor:
    """What attention makes of [positions, batch x heads, 3 x width]."""
    q, k, v = (part.transpose(0, 1) for part in heads.chunk(3, -1))
    shares = F.dropout(Softmax.apply(torch.bmm(q, k.transpose(1, 2))), DROPOUT)
    return torch.bmm(shares, v).transpose(0, 1)


class Layer(nn.Module):
    """One layer of GPT; rows are positions x batch."""

    def __init__(self, width: int, heads: int, row: dict[str, str], group: Any) -> None:
        super().__init__()
        self.width, self.batch, self.group = width, int(row["micro_batch"]), group
        self.heads, self.again = heads // size_of(group), row["recompute"] == "attn_only"
        self.column, self.row = (Column, Row) if row["sp"] == "True" else (WholeColumn, WholeRow)
        own = width // size_of(group)
        self.qkv, self.bias, self.out = weight(3 * own, width), weight(3 * own), weight(width, own)
        self.up, self.down = weight(4 * own, width), weight(width, 4 * own)
        self.norms = nn.ParameterList(weight(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.norms
        normed = F.layer_norm(x, (self.width,), first, second)
        made = self.column.apply(normed, self.qkv, self.group) + self.bias
        heads = made.view(SEQ, self.batch * self.heads, -1)
        out = checkpoint(mixed, heads, use_reentrant=False) if self.again else mixed(heads)
        out = self.row.apply(out.reshape(len(made), -1), self.out, self.group)
        x = x + F.dropout(out, DROPOUT)
        normed = F.layer_norm(x, (self.width,), third, fourth)
        inside = F.gelu(self.column.apply(normed, self.up, self.group), approximate="tanh")
        return x + F.dropout(self.row.apply(inside, self.down, self.group), DROPOUT)


class Stage(nn.Module):
    """Some layers; the first stage has the tables, the last the head."""

    def __init__(
        self, row: dict[str, str], layers: int, first: bool, last: bool, group: Any
    ) -> None:
        super().__init__()
        width, heads, _ = SIZES[row["model"]]
        self.width, self.full, self.group = width, row["recompute"] == "full", group
        self.shared = row["sp"] == "True"
        own = WORDS // size_of(group)
        self.words = weight(own, width) if first else None
        self.layers = nn.ModuleList(Layer(width, heads, row, group) for _ in range(layers))
        self.norms = nn.ParameterList(weight(width) for _ in range(2 * last))
        self.head = weight(own, width) if last else None

    def forward(self, x: Tensor, labels: Tensor, *unused: Tensor) -> Tensor:
        if self.words is not None:
            x = Embedding.apply(x, self.words, self.group)
            x = F.dropout(x if self.shared else Moved.apply(x, gather, own_rows, self.group))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.full else layer(x)
        if self.head is None:
            return x
        x = F.layer_norm(x, (self.width,), *self.norms)
        x = x if self.shared else Moved.apply(x, own_rows, gather, self.group)
        return CrossEntropy.apply(Head.apply(x, self.head, self.group), labels, self.group)


def own_rows(x: Tensor, group: Any) -> Tensor:
    """The rows of this process, as many as of each other."""
    return x.chunk(size_of(group))[0]


def stage_cost(row: dict[str, str], layers: int, first: bool, last: bool) -> tuple[StageCost, int]:
    """What a stage costs, and the bytes that it hands to the next."""
    tp, rows = int(row["tp"]), SEQ * int(row["micro_batch"])
    with rt.tools.fake_mesh({"tp": tp}) as mesh, torch.device("meta"):
        group, alone = mesh["tp"].get_group(), None
        stage = Stage(row, layers, first, last, group)
        ids = torch.zeros(rows, dtype=torch.long)
        own = rows // tp if row["sp"] == "True" else rows
        hidden = torch.zeros(own, stage.width, dtype=torch.bfloat16, requires_grad=True)
        graph = rt.trace(microbatch, stage, ids if first else hidden, ids, ids, ids)
        work = rt.estimate(graph, execution="mixed", system=SYSTEM)
        parts = Update(stage, alone, alone, group)
        optimizer = torch.optim.AdamW(parts.masters.parameters(), fused=True)
        graph = rt.trace(update, parts, optimizer)
        once = rt.estimate(graph, execution="mixed", system=SYSTEM)
    cost = StageCost.of(work)
    backward = work.t_est - cost.forward
    return replace(cost, backward=backward, once=once.t_est), 0 if last else hidden.nbytes


def seconds(row: dict[str, str]) -> float:
    """The predicted time of a step."""
    numbers = ("pp", "interleave", "global_batch", "micro_batch", "tp")
    pp, each, samples, micro, tp = (int(row[name]) for name in numbers)
    ends = [(n == 0, n == pp * each - 1) for n in range(pp * each)]
    layers = SIZES[row["model"]][2] // len(ends)
    made = {kinds: stage_cost(row, layers, *kinds) for kinds in sorted(set(ends))}
    stages = {number: made[kinds][0] for number, kinds in enumerate(ends)}
    schedule, handed = "interleaved-1f1b" if each > 1 else "1f1b", made[ends[0]][1]
    return pipelined(stages, schedule, samples // micro, handed, SYSTEM, tp, each).seconds


def main(folder: Path) -> None:
    """Print every row, and the mean error."""
    errors = []
    with (folder / "korthikanti.csv").open() as file:
        for row in csv.DictReader(file):
            made, told = seconds(row), float(row["seconds"])
            errors.append(made / told - 1)
            print(
                f"{row['model']} tp={row['tp']} pp={row['pp']} x {row['interleave']} "
                f"{row['recompute']}: {made:.2f} s, published {told}: {errors[-1]:+.1%}",
                flush=True,
            )
    mean = sum(map(abs, errors)) / len(errors)
    print(f"mean absolute error of time {mean:.1%} of {len(errors)} rows")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]))
