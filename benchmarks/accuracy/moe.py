"""Layers of routed experts that others measured, predicted kernel by kernel.

    python benchmarks/accuracy/moe.py FOLDER   # moe*.csv.gz in it and in kernels/

A row is one layer of experts on one process, the busiest, under CUDA graphs, in ms: T tokens of
`hidden_size`, k of `num_experts` experts of `inter_size`, shared by moe_tp_size (parts of every
expert) and moe_ep_size (some of the experts), and which rule drew the tokens (routed.py).  It holds
the kernels that an engine launches for it:

    vLLM          order of rows, two products, activation, sum; rows of experts elsewhere are
                  written as zeros, and passed on
    SGLang        the same for tokens with an expert here; the choice of experts, without moe_ep
    TensorRT-LLM  choice, rows copied in order, two products, activation, sum
    rounding      of tokens and of activations, where weights are in fp8

Weights stay in the last cache where they fit, since a row repeats one layer.  Each line of the
table is an engine's kernel in one format: errors without a fit, by the constants that come along
(`EXPERT_KERNELS`); with one factor; and with two numbers, one for products and one for the rest.
For the last two, a model (hidden, inter, experts) is left out of the fit and predicted.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from points import Point, parser_of, write_points
from routed import DRAWS, drawn
from rows import stage

import rooftrace as rt
from rooftrace.costmodels.kernels.experts import kernel_on
from rooftrace.costmodels.kernels.intervals import StepCell
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.kernels.seconds import KernelTable
from rooftrace.hardware.chip import Chip

WIDE = 2
"""Bytes of an element of tokens."""
CACHE = 3.0
"""How much faster the last cache is than the memory."""
CHOICE, EACH = {"TRTLLM": 19e-6, "SGLang": 6e-6}, {"TRTLLM": 6e-11, "SGLang": 1.5e-10}
"""Seconds of choosing experts, by engine: of a layer, and for each score.  From H200 rows.
TensorRT-LLM has a fused kernel up to 128 experts and 8 choices, and `topk` of PyTorch beyond."""
FUSED_EXPERTS, FUSED_CHOICES = 128, 8
EVENLY = {"TRTLLM": "1.3.0rc11", "SGLang": "0.5.10", "VLLM": "0.17"}
"""The version of each engine since which draws are brought to their sum evenly."""
TRITON_INT4 = ("0.17", "0.24")
"""From which to before which version of vLLM rows named Marlin ran a Triton kernel that widens the
weights: the collector called `fused_experts` with packed ones."""


@dataclass(frozen=True)
class Format:
    """How a format of the rows is stored and multiplied."""

    name: str  # of the cell of an interval
    computes: str  # precision of the products
    weights: float  # bytes of a stored weight, with its scales


FORMATS: Mapping[str, Format] = {
    "bfloat16": Format("half", "bf16", 2.0),
    "float16": Format("half", "bf16", 2.0),
    "fp8": Format("fp8", "fp8", 1.0),
    "fp8_block": Format("fp8", "fp8", 1.0),
    "nvfp4": Format("fp4", "fp4", 0.5625),
    "w4afp8": Format("fp8", "fp8", 0.515625),
    "int4_wo": Format("int4", "bf16", 0.515625),
    "w4a16_mxfp4": Format("int4", "bf16", 0.53125),
    "w4a8_mxfp4_mxfp8": Format("fp8", "fp8", 0.53125),
}
"""int4 has a 16-bit scale for 128 values, mxfp4 8 bits for 32, nvfp4 8 bits for 16."""
KERNELS = {
    "vllm_fused_moe": "vllm triton",
    "vllm_mxfp4_moe": "matmul_ogs",
    "vllm_flashinfer_trtllm_moe_fp4": "trtllm-gen",
    "sglang_fused_moe_triton": "sglang triton",
    "sglang_triton_kernel_moe": "matmul_ogs",
    "sglang_flashinfer_cutedsl_moe": "cutedsl",
    "sglang_flashinfer_cutlass_moe": "cutlass",
    "sglang_flashinfer_trtllm_moe": "trtllm-gen",
    "sglang_flashinfer_mxfp4_moe": "trtllm-gen",
    "sglang_marlin_moe": "marlin",
    "vllm_marlin_int4_moe": "marlin",
    "moe_torch_flow_min_latency": "trtllm-gen",
    "moe_torch_flow_cutlass": "cutlass",
    "moe_torch_flow_nongated": "cutlass",
    "moe_torch_flow": "cutlass",
    "deepgemm": "cutlass",
}
"""Whose kernel a `kernel_source` is."""
USUAL = {"VLLM": "vllm triton", "SGLANG": "sglang triton", "TRTLLM": "cutlass"}
"""The kernel of an engine where the source is not listed."""


@dataclass(frozen=True)
class Layers:
    """Rows of one file that ran one kernel in one format."""

    file: str
    chip: Chip
    engine: str
    version: str
    source: str
    format: str
    rows: tuple[Mapping[str, str], ...]

    @property
    def kernel(self) -> str:
        """The library's kernel, as EXPERT_KERNELS names it."""
        name = KERNELS.get(self.source, USUAL.get(self.engine.upper(), "vllm triton"))
        old, new = (_version(limit) for limit in TRITON_INT4)
        if self.source == "vllm_marlin_int4_moe" and old <= _version(self.version) < new:
            name = "widening"
        if "mxfp4" in self.format and name in ("cutlass", "matmul_ogs"):
            blackwell = StepCell.generation_of(self.chip) == "blackwell"
            name = "trtllm-gen" if blackwell else "matmul_ogs"
        return name

    @property
    def stored(self) -> Format:
        """Its format; that of bf16 where it is not known."""
        return FORMATS.get(self.format, FORMATS["bfloat16"])

    @property
    def computes(self) -> str:
        """The precision of its products; half precision where the chip lacks it."""
        names = (self.stored.computes, "bf16", "fp16")
        return next((name for name in names if self.chip.has_peak("matrix", name)), "")

    @property
    def notes(self) -> list[str]:
        """What of it is not known, and what is taken instead."""
        taken = f"{self.file}: {self.source} in {self.format}"
        notes = []
        if self.source not in KERNELS:
            notes.append(f"{taken}: a kernel that is not listed, taken as {self.kernel}")
        if self.format not in FORMATS:
            notes.append(f"{taken}: a format that is not listed, taken as bf16")
        if self.computes != self.stored.computes:
            notes.append(f"{taken}: {self.chip.name} lacks its rate, taken in {self.computes}")
        return notes


def _version(text: str) -> tuple[int, ...]:
    """Numbers that order versions: a candidate, as 1.3.0rc10, comes before its release."""
    numbers = [int(x) for x in re.findall(r"\d+", text)]
    release = [*numbers, 0, 0, 0][:3]
    return (*release, numbers[3] if "rc" in text and len(numbers) > 3 else 999)


def layers(path: Path, notes: list[str]) -> Iterable[Layers]:
    """The rows of a file, by what ran.  notes: gets a line for each chip that is not known."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        found: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
        for row in csv.DictReader(file):
            keys = ("file", "device", "framework", "version", "kernel_source", "moe_dtype")
            key = tuple(row.get(name) or "" for name in keys)
            found[(key[0] or path.name.partition(".")[0], *key[1:])].append(row)
    for (name, device, *rest), rows in sorted(found.items()):
        chip = chip_of(name, device)
        if chip is None or not (chip.has_peak("matrix", "bf16") or chip.has_peak("matrix", "fp16")):
            notes.append(f"{name}: {len(rows)} rows left out: no chip with a matrix engine for "
                         f"half precision is named so, or {device!r}")  # fmt: skip
            continue
        yield Layers(name, chip, *rest, tuple(rows))


def chip_of(file: str, device: str) -> Chip | None:
    """The chip that a file is named after, else that of the device."""
    named = file.partition("_moe")[0].removeprefix("moe-").replace("_", "-")
    for words in (named.split("-"), re.sub(r"^nvidia ", "", device.lower()).split()):
        for count in range(len(words), 0, -1):
            name = "-".join(words[:count])
            for known in (name, f"{name}-sxm", f"{name}-80"):
                try:
                    return rt.load_chip(known)
                except (ValueError, LookupError):
                    continue
    return None


# -- kernels of a layer ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Seconds of layers: of their products, and of all else."""

    products: np.ndarray
    rest: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.products + self.rest


def sizes_of(layer: Layers) -> dict[str, np.ndarray]:
    """What each row's process computes: arrays by name."""
    evenly = _version(layer.version) >= _version(EVENLY.get(layer.engine, "0"))
    lines = []
    for row in layer.rows:
        tokens, experts, k, parts, processes = (
            int(row[name])
            for name in ("num_tokens", "num_experts", "topk", "moe_tp_size", "moe_ep_size")
        )
        alone = layer.source == "vllm_mxfp4_moe"  # its layer was made without processes
        rule, shared = row["distribution"], 1 if alone else processes
        grouped = layer.source.endswith("min_latency")
        draw = drawn(tokens, experts, k, shared, rule, evenly, grouped)
        if layer.kernel == "marlin" and layer.engine == "SGLang" and processes > 1:
            # Tokens with an expert here chose k among those here.
            here, local = max(round(draw.tokens), 1), experts // processes
            draw = replace(drawn(here, local, k, 1, rule, evenly), tokens=here)
        passed = {"VLLM": tokens * k, "SGLang": draw.tokens * k}.get(layer.engine, draw.rows)
        if layer.kernel in ("cutedsl", "trtllm-gen"):
            passed = draw.rows
        elif layer.kernel == "matmul_ogs":  # its buffers have a row for each choice, also elsewhere
            passed = tokens * k
        sees = tokens if layer.engine == "VLLM" else draw.tokens
        inter = int(row["inter_size"]) / parts
        lines.append((int(row["hidden_size"]), inter, draw.rows, draw.hit, sees, passed,
                      experts, k, processes))  # fmt: skip
    names = ("hidden", "inter", "rows", "hit", "tokens", "passed", "experts", "k", "processes")
    sizes = dict(zip(names, np.array(lines, dtype=float).T, strict=True))
    least = 1 / DRAWS  # one row in one of the draws
    return {n: np.maximum(x, least) if n in ("rows", "hit") else x for n, x in sizes.items()}


def timed(layer: Layers, knobs: Knobs) -> Timed:
    """Seconds of the kernels of each row."""
    z = sizes_of(layer)
    products, others = (sum_of(tables, knobs) for tables in kernels_of(layer, z))
    return Timed(products, others + _choosing(layer, z))


def kernels_of(
    layer: Layers, z: Mapping[str, np.ndarray]
) -> tuple[list[KernelTable], list[KernelTable]]:
    """The products of each row, and its other kernels.  z: its sizes."""
    chip, stored = layer.chip, layer.stored
    computes = layer.computes
    narrow = {"fp8": 1.0, "fp4": 0.5625}.get(computes, float(WIDE))
    gate = 1 if layer.source.endswith("nongated") else 2
    weights = z["hit"] * z["hidden"] * z["inter"] * (gate + 1) * stored.weights
    touched = weights + WIDE * z["rows"] * (z["hidden"] + (gate + 1) * z["inter"])
    room = chip.l2_capacity.value if chip.l2_capacity else 0.0
    warm = np.clip((room - touched) / touched, 0.0, 1.0)
    elsewhere = z["passed"] - z["rows"]
    gated = z["inter"] * gate
    copies = layer.engine == "TRTLLM" and layer.kernel == "cutlass"
    summed = layer.kernel not in ("cutedsl",) and not layer.source.endswith("min_latency")
    rounds = narrow < WIDE and not copies

    def product(columns: np.ndarray, inner: np.ndarray) -> KernelTable:
        moved = z["hit"] * columns * inner * stored.weights
        moved = moved + z["rows"] * (inner * narrow + columns * WIDE) + elsewhere * columns * WIDE
        rate = chip.peak("matrix", computes)
        return stage(chip, "grouped mm", moved, warm, **{"experts rate": rate}, rate=rate,
            experts=kernel_on(chip, layer.kernel, _key(layer.format)),
            flop=2 * z["rows"] * columns * inner,
            rows=z["rows"] / z["hit"], columns=columns, inner=inner, products=z["hit"],
            width_a=narrow, width_b=stored.weights)  # fmt: skip

    others = [stage(chip, "sort", z["passed"] * 8, warm)]
    if rounds:
        others.append(stage(chip, "cast", z["tokens"] * z["hidden"] * (WIDE + narrow), warm))
        others.append(stage(chip, "cast", z["passed"] * z["inter"] * (WIDE + narrow), warm))
    if copies:
        moved = z["tokens"] * z["hidden"] * WIDE + z["rows"] * z["hidden"] * narrow
        others.append(stage(chip, "gather", moved, warm))
    if layer.kernel not in ("trtllm-gen", "matmul_ogs"):  # elsewhere the activation is a kernel
        others.append(stage(chip, "elementwise", z["passed"] * (gated + z["inter"]) * WIDE, warm))
    if summed:
        moved = (z["passed"] + z["tokens"]) * z["hidden"] * WIDE
        others.append(stage(chip, "reduction", moved, warm))
    return [product(gated, z["hidden"]), product(z["hidden"], z["inter"])], others


def sum_of(tables: Iterable[KernelTable], knobs: Knobs) -> np.ndarray:
    """Seconds of one kernel of each table, with their launches."""
    total: np.ndarray = sum(
        table.seconds(knobs, layouts=False).device + knobs.launch_on(table.chip) for table in tables
    )
    return total


def _choosing(layer: Layers, z: Mapping[str, np.ndarray]) -> np.ndarray:
    """Seconds of choosing experts, where rows hold it."""
    many = (z["experts"] > FUSED_EXPERTS) | (z["k"] > FUSED_CHOICES)
    many = many & (layer.kernel != "trtllm-gen")  # chooses in one kernel
    if layer.engine == "SGLang":
        many = (z["processes"] == 1) | (layer.kernel == "marlin")
        many = many & (layer.kernel != "cutedsl")
    seconds = (
        CHOICE.get(layer.engine, 0.0) + EACH.get(layer.engine, 0.0) * z["tokens"] * z["experts"]
    )
    return np.where(many, seconds, 0.0)


def _key(name: str) -> str:
    """The format of EXPERT_KERNELS for one of the rows."""
    return {"fp8_block": "fp8 blocks"}.get(name, FORMATS.get(name, FORMATS["bfloat16"]).name)


def begun(chip: Chip) -> Knobs:
    """What comes along for a chip, as fast as a kernel alone runs."""
    return replace(Knobs.typical(chip, compiled=False, sustained=False), cache=CACHE)


# -- errors ----------------------------------------------------------------------------------------


def left_out(layer: Layers, times: Timed, measured: np.ndarray, two: bool) -> np.ndarray:
    """Seconds by a factor, or two, that were fitted to the rows of other models."""
    models = [tuple(row[n] for n in ("hidden_size", "inter_size", "num_experts"))
              for row in layer.rows]  # fmt: skip
    result = times.total.copy()
    for model in set(models):
        out = np.array([other == model for other in models])
        if out.all():
            return result * np.nan
        if not two:
            result[out] *= np.exp(np.median(np.log(measured[~out] / times.total[~out])))
            continue
        terms = np.stack([times.products, times.rest], axis=1)
        scaled = terms[~out] / measured[~out, None]
        by = np.linalg.lstsq(scaled, np.ones(len(scaled)), rcond=None)[0]
        result[out] = terms[out] @ by if (by > 0).all() else result[out]
    return result


def _share(value: float) -> str:
    """A share as text; nothing where a model alone leaves no rows to fit."""
    return "" if np.isnan(value) else f"{value:.1%}"


def numbers(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float, float, float]:
    """Mean, median and 90th percentile of the size of errors, and their mean with the sign."""
    off = predicted / measured - 1
    size = abs(off)
    return size.mean(), np.median(size), np.quantile(size, 0.9), off.mean()


def cell_of(layer: Layers, memory: bool) -> StepCell:
    return StepCell(generation=StepCell.generation_of(layer.chip), precision=layer.stored.name,
                    phase="kernel", execution="graph", work="moe",
                    limit="memory" if memory else "compute")  # fmt: skip


def study(layer: Layers, points: list[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Prints the line of a kernel; predicted and measured seconds.  Adds to `points`."""
    times = timed(layer, begun(layer.chip))
    measured = np.array([float(row["latency"]) for row in layer.rows]) * 1e-3
    columns = [numbers(times.total, measured)]
    columns += [numbers(left_out(layer, times, measured, two), measured) for two in (False, True)]
    (mean, median, p90, bias), factor, two = columns
    print(
        f"| {layer.file} | {layer.source} | {layer.format} | {len(measured)} | {mean:.1%} "
        f"| {median:.1%} | {p90:.1%} | {bias:+.1%} | {_share(factor[0])} | {_share(two[0])} |"
    )
    label = "{num_tokens} tokens, {topk} of {num_experts} x {inter_size} / {moe_tp_size}"
    points += [
        Point(
            label.format(**row), float(seconds), float(took), f"{layer.chip.name} {layer.kernel}"
        ).of(f"aiconfigurator {layer.file}", cell_of(layer, bool(memory)))
        for row, seconds, took, memory in zip(
            layer.rows, times.total, measured, _few(layer), strict=True
        )
    ]
    return times.total, measured


def _few(layer: Layers) -> np.ndarray:
    """Whether the products of rows wait for their weights: fewer FLOP a byte than the chip."""
    z = sizes_of(layer)
    balance = layer.chip.peak("matrix", layer.computes) / layer.chip.memory_bandwidth.value
    few: np.ndarray = 2 * z["rows"] / z["hit"] / layer.stored.weights < balance
    return few


def main() -> None:
    given = parser_of(__doc__).parse_args()
    paths = sorted({*given.folder.glob("moe*.csv.gz"), *given.folder.glob("kernels/moe*.csv.gz")})
    if not paths:
        raise SystemExit(f"{given.folder}: no moe*.csv.gz there or in kernels/")
    points: list[Point] = []
    every = []
    notes: list[str] = []
    head = "file | kernel | format | rows | mean | median | p90 | bias | one factor | two numbers"
    print(f"| {head} |\n|---|---|---|{'---:|' * 7}")
    for layer in (layer for path in paths for layer in layers(path, notes)):
        notes += layer.notes
        every.append(study(layer, points))
    if not every:
        raise SystemExit("\n".join(notes))
    predicted, measured = (np.concatenate(column) for column in zip(*every, strict=True))
    mean, median, p90, bias = numbers(predicted, measured)
    print(
        f"| all | | | {len(measured)} | {mean:.1%} | {median:.1%} | {p90:.1%} | {bias:+.1%} | | |"
    )
    print("".join(f"\n{note}." for note in notes))
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
