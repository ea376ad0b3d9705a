"""Traces of DeepSeek-V3 at the sizes of the earlier report, and what the presets make of them.

A point is priced by the preset of its execution, and again with one thing changed: attention as one
kernel, latents absorbed.  What a change saves is the number behind a reason.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import formulas

import rooftrace as rt
from rooftrace.costmodels.kernels.seconds import peak_seconds
from rooftrace.costmodels.kernels.works import SizedKernel, kernels_of
from rooftrace.costmodels.ops import COMPUTED, Cost
from rooftrace.hardware.precisions import bytes_per_element

CONFIG = Path(rt.__file__).parent / "tracer" / "targets" / "configs" / "deepseek-v3.json"
CHIP = rt.load_chip("h200-sxm")
ABSORBED = ("absorb-latent",)


@dataclass(frozen=True, slots=True)
class Point:
    """A step at some sizes; kv_rank and hidden are factors on the dimensions of the config."""

    phase: str
    batch: int
    length: int  # of the prompt; in decode of the cache
    kv_bytes: int = 1
    top_k: int = 8
    kv_rank: float = 1.0
    hidden: float = 1.0

    @property
    def dimensions(self) -> formulas.Dimensions:
        """As the earlier report scaled them: attention as a whole."""
        return formulas.at(self.top_k, self.kv_rank, self.hidden, self.kv_bytes)

    @property
    def true_dimensions(self) -> formulas.Dimensions:
        """As the config has them that is traced."""
        config = self.config
        return replace(
            self.dimensions,
            kv_rank=config["kv_lora_rank"],
            attention_hidden=config["hidden_size"],
            attention=1.0,
            cache=1.0,
        )

    @property
    def config(self) -> dict[str, int]:
        """What this point changes in the config, and what that changes."""
        base = formulas.Dimensions()
        return {
            "hidden_size": round(base.hidden * self.hidden),
            "intermediate_size": round(base.dense_width * self.hidden),
            "moe_intermediate_size": round(base.expert_width * self.hidden),
            "kv_lora_rank": round(base.kv_rank * self.kv_rank),
            "num_experts_per_tok": self.top_k,
        }


@lru_cache(maxsize=2)
def graph_of(point: Point) -> rt.types.OpGraph:
    """The trace of a point, in fp8; in bf16 what it caches at two bytes."""
    with TemporaryDirectory() as folder:
        config = json.loads(CONFIG.read_text(encoding="utf-8"))
        target = Path(folder) / "config.json"
        target.write_text(json.dumps({**config, **point.config}), encoding="utf-8")
        sizes = {"kv" if point.phase == "decode" else "seq": point.length}
        return rt.trace(target, phase=point.phase, batch=point.batch, **sizes)


def repriced(point: Point) -> rt.types.OpGraph:
    """The graph of a point at one byte for each element, two for the cache where it says so."""
    graph = graph_of(replace(point, kv_bytes=1))
    return rt.tools.reprice(graph, dtype="fp8", kv_dtype="bf16" if point.kv_bytes == 2 else None)


@dataclass(frozen=True, slots=True)
class Priced:
    """What a preset makes of a trace.

    bytes: by (family, role).  narrow, wide: by family what is neither weights nor cache nor
    gradients, as if each element took one byte, and what wider ones take more.
    """

    estimate: rt.types.Estimate
    bytes: Counter[tuple[str, str]]
    narrow: Counter[str]
    wide: Counter[str]
    products: Counter[str]  # of `narrow`, what matrix products read and write
    seconds: Counter[tuple[str, str]]  # of computing, by (operation, precision)

    @property
    def others(self) -> float:
        """Bytes but those of weights, cache and gradients."""
        return sum(self.narrow.values()) + sum(self.wide.values())

    def role(self, role: str) -> int:
        """Bytes of a role, but for the optimizer."""
        sizes = self.bytes.items()
        return sum(size for (family, name), size in sizes if name == role and family != "optimizer")

    @property
    def optimizer(self) -> float:
        """All bytes of the optimizer's own step."""
        sizes = self.bytes.items()
        return sum(size for (family, _), size in sizes if family == "optimizer")


def priced(point: Point, execution: str, **changes: object) -> Priced:
    """A point by the preset `seed-EXECUTION`, with fields of it changed."""
    model = rt.tools.execution_model(f"seed-{execution}", **changes)
    estimate = rt.estimate(repriced(point), CHIP, model)
    plan, values = estimate.plan, estimate.graph.values
    by_role: Counter[tuple[str, str]] = Counter()
    narrow: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    products: Counter[str] = Counter()
    for row in estimate.rows:
        cost = plan.costs[row.index]
        is_product = any(work.operation == "matmul" for work in cost.work)
        for role, size in row.bytes_by_role.items():
            by_role[row.family, role] += size
        for access, size in cost.traffic.items():
            value = values[access.storage]
            if access.wire != "hbm" or value.role in ("weights", "kv", "gradients"):
                continue
            moved, element = size * row.count, bytes_per_element(value.dtype)
            narrow[row.family] += moved / element
            wide[row.family] += moved - moved / element
            products[row.family] += moved / element if is_product else 0
    seconds: Counter[tuple[str, str]] = Counter()
    for work, flop in plan.total.work.items():
        if work.count in COMPUTED:
            kernels, _ = kernels_of([SizedKernel(Cost({work: flop}), "mm")])
            (took,) = peak_seconds(kernels, CHIP, model, estimate.peak)
            seconds[work.operation, work.precision] += float(took)
    return Priced(estimate, by_role, narrow, wide, products, seconds)
