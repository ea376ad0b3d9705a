"""Small models for plans at many sizes: a stack of decoder layers, a stack of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.plans import Launch, Plan
from rooftrace.costmodels.kernels.works import KernelAmounts, SizedKernel, Works, kernels_of
from rooftrace.costmodels.timing.steps import Part, StepAmounts, step_of, times_of
from rooftrace.costmodels.timing.streams import Walk
from rooftrace.costmodels.timing.timings import EntrySeconds, Headline, StepTimes, Timing
from rooftrace.graph.graph import OpGraph
from rooftrace.hardware.chip import Chip

WIDTH, HEADS, KV_HEADS = 64, 4, 2


class Layer(nn.Module):
    """One decoder layer: a token for each request, beside keys and values of earlier ones."""

    def __init__(self, batch: int, kv: int, waits: bool) -> None:
        super().__init__()
        self.waits = waits
        size = WIDTH // HEADS
        for name in ("keys", "values"):
            self.register_buffer(name, torch.empty(batch, KV_HEADS, kv, size))
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows = x.shape[:2]
        hidden = self.norm(x)
        query = self.q(hidden).view(batch, rows, HEADS, -1).transpose(1, 2)
        key, value = self.kv(hidden).view(batch, rows, 2 * KV_HEADS, -1).transpose(1, 2).chunk(2, 1)
        keys, values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, rows, -1))
        gate, up = self.up(x).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * up)
        if self.waits:
            x.sum().item()
        return x


class Decoder(nn.Module):
    def __init__(self, layers: int, *sizes: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.layers = nn.ModuleList([Layer(*sizes) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 96, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decode(
    batch: int, kv: int, layers: int = 9, waits: bool = False, dtype: torch.dtype = torch.bfloat16
) -> OpGraph:
    """A step of the decoder."""
    with torch.device("meta"):
        model = Decoder(layers, batch, kv, waits).to(dtype)
        tokens = torch.zeros(batch, 1, dtype=torch.long)
    return rt.trace(model, tokens)


def images(batch: int, size: int) -> OpGraph:
    """Convolutions with more and with fewer channels, in fp32."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, groups=16),
            nn.Conv2d(16, 32, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 5),
        )
        x = torch.empty(batch, 3, size, size)
    return rt.trace(model, x)


def planned(graphs: list[OpGraph], execution: Any) -> list[Plan]:
    return [rt.plan(graph, execution) for graph in graphs]


# -- steps at many points --------------------------------------------------------------------------


def stack(plans: Sequence[Plan], chip: Chip | None = None) -> StepAmounts:
    """A step over plans of equal structure, a point for each."""
    steps = [step_of(plan, chip) for plan in plans]
    first, points = steps[0], len(steps)
    starts = np.cumsum([0, *(len(step.kernels) for step in steps)])
    rows = np.stack([step.row + start for step, start in zip(steps, starts, strict=False)])

    def moved(name: str) -> tuple[Works, ...]:
        return tuple(
            replace(work, row=work.row + start)
            for step, start in zip(steps, starts, strict=False)
            for work in getattr(step.kernels, name)
        )

    arrays = ("kind", "bytes", "warm", "instructions", "trips", "after", "turned", "link", "host",
              "eager")  # fmt: skip
    kernels = KernelAmounts(
        **{name: np.concatenate([getattr(s.kernels, name) for s in steps]) for name in arrays},
        works=moved("works"),
        attention=moved("attention"),
    )
    return replace(
        first,
        points=points,
        kernels=kernels,
        row=rows.T.ravel(),
        times=np.stack([step.times for step in steps]).T.ravel(),
        parts=[
            replace(part, where=slice(number * points, (number + 1) * points))
            for number, part in enumerate(first.parts)
        ],
        counts=[np.array(counts) for counts in zip(*(s.counts for s in steps), strict=True)],
        products={
            key: np.array([step.products.get(key, 0) for step in steps], dtype=float)
            for key in {key: None for step in steps for key in step.products}
        },
    )


def bare_step(
    count: int, launches: Sequence[Launch], execution: str = "efficient", **others: Any
) -> StepAmounts:
    """A step of so many kernels that do nothing, one of each part."""
    kernels, _ = kernels_of([SizedKernel(rt.extend.Cost(), "copy")])
    points = others.get("points", 1)
    return StepAmounts(
        **{
            "points": points,
            "execution": execution_model(execution),
            "kernels": kernels,
            "row": np.zeros(count * points, dtype=int),
            "times": np.ones(count * points),
            "parts": [
                Part(where=slice(n * points, (n + 1) * points), spread_kind="copy")
                for n in range(count)
            ],
            "order": range(count),
            "launches": tuple(launches),
            "products": {},
            **others,
        }
    )


def times_of_kernels(
    kernels: Sequence[Timing],
    end: float,
    fast: Sequence[Timing] | None = None,
    times: Sequence[int] | None = None,
) -> StepTimes:
    """The times of a step whose kernels take these seconds, and which ends then."""

    def seconds(of: Sequence[Timing]) -> EntrySeconds:
        names = ("t_comp", "t_hbm", "t_net", "gap", "more")
        return EntrySeconds(
            *(np.array([getattr(each, name) for each in of], float) for name in names)
        )

    step = bare_step(len(kernels), [Launch(1, True)] * len(kernels))
    step = replace(step, times=np.array(times or [1] * len(kernels), dtype=float))
    heads = Headline((1.0,), ("fp32",), np.zeros(1, dtype=np.int8))
    pair = seconds(kernels if fast is None else fast), seconds(kernels)
    return times_of(step, pair, {}, Walk([], [], end), None, heads).at(0)
