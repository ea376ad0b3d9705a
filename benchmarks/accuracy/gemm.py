"""Matrix products that others measured, predicted by tiles and waves.

    python benchmarks/accuracy/gemm.py FOLDER        # every gemm-*.csv.gz in it and in kernels/

Rows are m, n, k, a number format and a latency in ms, with the GPU, the engine and its version.  Of
each of them and each format, the numbers that come along predict all rows (of a product alone,
which no limit on power slows); then one factor and two numbers (sustained arithmetic and bandwidth)
are fitted to 200 rows and predict the rest, for five seeds.

How rows were measured is read off the collectors' sources (ai-dynamo/aiconfigurator,
collector/{vllm,trtllm,sglang}/collect_gemm.py): layers in turn under a CUDA graph, on one input (of
SGLang each on its own), six of them, or one of narrow formats (vLLM), or at most five, as many as
fill the last cache (TensorRT-LLM).  A result is freed at once, so the next layer writes it where
the last one did.  Activations come in bf16: rows of narrow formats hold the kernels that round
them.
vLLM's rows of block scales have no CUDA graph (since 0.24): small products take as long as the host
needs to launch them, which says nothing of kernels.  They stand in rows of their own ("host").
"""

from __future__ import annotations

import csv
import gzip
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from measured_kernels import CACHE, kept
from points import Point, parser_of, write_points

import rooftrace as rt
from rooftrace.costmodels.fusion import ExecutionModel, execution_model
from rooftrace.costmodels.kernels.intervals import StepCell
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.kernels.seconds import KernelTable, table_of
from rooftrace.costmodels.kernels.works import SizedKernel, kernels_of
from rooftrace.costmodels.ops import Access, Cost
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.precisions import PRECISIONS, precision, storage_bytes, widest
from rooftrace.measured.fit.cases import Case, Errors, errors, predict
from rooftrace.measured.fit.fitting import fit

FITTED, SEEDS = 200, 5
CHIPS = {
    "gb300": "gb300", "gb200": "gb200", "b300": "b300-sxm", "b200": "b200-sxm",
    "h200": "h200-sxm", "h20": "h20", "h100 pcie": "h100-pcie", "h100": "h100-sxm",
    "h800": "h800-sxm", "gh200": "gh200-96", "a100": "a100-sxm-80", "a800": "a800-sxm-80",
    "l40s": "l40s", "l4": "l4", "a10": "a10", "rtx pro 6000": "rtx-pro-6000",
    "6000 ada": "rtx-6000-ada", "4090": "rtx-4090", "5090": "rtx-5090", "3090": "rtx-3090",
    "mi300x": "mi300x", "mi325x": "mi325x", "mi350x": "mi350x", "mi355x": "mi355x",
}  # fmt: skip
"""Chips by words of the device's name, or else of the file's."""
LIBRARIES = {"vllm": "vllm", "trtllm": "trtllm", "tensorrt": "trtllm", "sglang": "sglang"}
FORMATS = {
    "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8_afp8", "fp8_static": "fp8_afp8",
    "fp8_block": "fp8_g128x128_s32_afp8", "mxfp8": "mxfp8_afp8", "nvfp4": "nvfp4_afp4",
    "mxfp4": "mxfp4_afp4", "w4a16_mxfp4": "mxfp4", "int8": "int8_aint8", "sq": "int8_aint8",
    "int8_wo": "int8", "int4_wo": "int4_g128_s16", "int4": "int4_g128_s16",
    "w4a16": "int4_g128_s16", "w4afp8": "int4_g128_s16_afp8",
}  # fmt: skip
"""How weights are stored, and which format products round activations to."""
HALF = 2.0
LAYERS = 6
HOST = 30e-6
"""Seconds that no smallest product takes under a CUDA graph: with such a least latency, rows of a
kernel were launched one by one."""
ABOVE = 2.0
"""Predictions below so many times that least latency are the host's."""


@dataclass(frozen=True)
class Products:
    """Measured products of one engine on one chip in one format."""

    chip: Chip
    engine: str
    library: str  # of `ExecutionModel.library`
    form: str  # as the rows name it
    names: Sequence[str]
    table: KernelTable
    rows: np.ndarray  # of the table, by product
    seconds: np.ndarray
    least: np.ndarray  # the least latency by product, of those of its kernel; 0 under a CUDA graph

    @property
    def source(self) -> str:
        return f"aiconfigurator {self.chip.name} {self.engine} gemm"

    def predicted(self, knobs: Knobs) -> np.ndarray:
        """Seconds of each product."""
        device = self.table.seconds(knobs, layouts=False).device
        seconds: np.ndarray = device[self.rows] + knobs.launch_on(self.chip)
        return seconds

    def case(self, at: int) -> Case:
        """One product, to fit knobs to."""
        row = [int(self.rows[at])]
        data = {name: column[row] for name, column in self.table.data.items()}
        table = KernelTable(self.chip, self.table.kind[row], data)
        return Case(name=self.names[at], table=table, seconds=float(self.seconds[at]))


def typical(chip: Chip) -> Knobs:
    """What comes along; on data-center GPUs as fast as a product alone runs."""
    of = Knobs.generation(chip)
    knobs = Knobs.typical(chip, compiled=False, sustained=of in (None, "ada"))
    return replace(knobs, cache=CACHE) if of == "ada" else knobs


def chip_of(device: str, file: str) -> Chip | None:
    """The chip of a row; None for one that rooftrace does not have."""
    for text in (device, file):
        plain = re.sub(r"[^a-z0-9]+", " ", text.lower())
        for word, name in CHIPS.items():
            if re.search(rf"\b{word}\b", plain):
                return rt.load_chip(name)
    return None


def products_in(folder: Path, notes: list[str]) -> Iterator[Products]:
    """All products of the files, by chip, engine and format; notes say what it does not know."""
    files = sorted(folder.glob("gemm-*.csv.gz")) + sorted(folder.glob("kernels/gemm-*.csv.gz"))
    if not files:
        raise SystemExit("no gemm-*.csv.gz in that folder")
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    for path in files:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                of = (row.get("device", ""), row.get("file") or path.name)
                engine = f"{row.get('framework', '')} {row.get('version', '')}".strip()
                groups[(*of, engine or path.name, row["gemm_dtype"])].append(row)
    for (device, name, engine, form), rows in groups.items():
        chip = chip_of(device, name)
        if chip is None or form not in FORMATS:
            notes.append(f"{device or name}, {engine}, {form}: unknown, {len(rows)} rows left out")
            continue
        library = next((lib for word, lib in LIBRARIES.items() if word in engine.lower()), "")
        if not library:
            notes.append(f"{engine}, {form}: an unknown engine, taken to run PyTorch's kernels")
            library = "torch"
        yield products(chip, engine, library, form, rows)


def products(
    chip: Chip, engine: str, library: str, form: str, rows: Sequence[Mapping[str, str]]
) -> Products:
    """The products of these rows."""
    sizes = [(int(row["m"]), int(row["n"]), int(row["k"])) for row in rows]
    kernels = [kernel(*size, form, library, engine, chip) for size in sizes]
    amounts, places = kernels_of(kernels)
    seconds = np.array([float(row["latency"]) * 1e-3 for row in rows])
    by_kernel: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        by_kernel[row.get("kernel_source", "")].append(number)
    least = np.zeros(len(rows))
    for numbers in by_kernel.values():
        floor = seconds[numbers].min()
        least[numbers] = floor if floor > HOST else 0.0
    table = table_of(amounts, chip, run(library))
    computes = precision(FORMATS[form]).computes
    if computes and chip.has_peak("matrix", computes):  # where a step may round before, too
        numbers = table.data["rows"] * table.data["inner"]
        table.data["rounded"] = np.where(table.data["kernel"] > 0, numbers, 0.0)
    return Products(
        chip=chip,
        engine=engine,
        library=library,
        form=form,
        names=["{}x{}x{}".format(*size) for size in sizes],
        table=table,
        rows=np.array(places),
        seconds=seconds,
        least=least,
    )


def run(library: str) -> ExecutionModel:
    """How these products run."""
    return execution_model("efficient", library=library)


def kernel(m: int, n: int, k: int, form: str, library: str, engine: str, chip: Chip) -> SizedKernel:
    """A linear layer as its rule prices it, with the bytes that the cache still holds."""
    stored = precision(FORMATS[form])
    computes = PRECISIONS[stored.computes].width / 8 if stored.computes else HALF
    wide = min(HALF, stored.width / 8)
    a, b, c = int(HALF) * m * k, storage_bytes(FORMATS[form], n * k), int(HALF) * m * n
    cost = Cost.of(
        matmul=2 * m * n * k, precision=widest("bf16", FORMATS[form]), rows=m, columns=n, inner=k,
        widths=(min(HALF, computes), wide), lined="NK",
    )  # fmt: skip
    traffic = {Access(0, False): a, Access(1, False): b, Access(2, True): c}
    capacity = 0.0 if chip.l2_capacity is None else chip.l2_capacity.value
    layers = layers_of(library, form, n * k * wide, capacity)
    rounded = m * k * computes if stored.computes else 0
    each = a + b + c + rounded
    turn = each + (layers - 1) * (b + (a if library == "sglang" else 0))
    warm = held(c, each, capacity) + held(b, turn, capacity)
    warm += held(a, turn if library == "sglang" else each, capacity)
    return SizedKernel(Cost(cost.work, traffic), "mm", warm=warm)


def held(size: float, touched: float, capacity: float) -> float:
    """Bytes of a tensor that a cache holds, by all that is touched until it is used again."""
    return size * kept(touched / capacity) if capacity else 0.0


def layers_of(library: str, form: str, weights: float, capacity: float) -> int:
    """How many layers are measured in turn."""
    if library == "trtllm":
        return max(1, min(5, -int(-capacity // weights)))
    return 1 if library == "vllm" and form in ("fp8_block", "nvfp4") else LAYERS


# -- scores ----------------------------------------------------------------------------------------


def score(of: Products, chosen: np.ndarray, plain: np.ndarray, seed: int) -> list[float]:
    """The mean errors of one factor, and of two numbers, on rows that they were not fitted to."""
    order = random.Random(seed).sample(list(chosen), len(chosen))
    inside, outside = order[:FITTED], order[FITTED:]
    if not outside:
        return []
    factor = np.exp(np.median(np.log(of.seconds[inside] / plain[inside])))
    cases = [of.case(at) for at in inside]
    knobs = fit(cases, typical(of.chip), ("compute", "memory"), check=False).knobs
    fitted = predict([of.case(at) for at in outside], knobs)
    measured = of.seconds[outside]
    one, two = (np.abs(each / measured - 1).mean() for each in (factor * plain[outside], fitted))
    return [float(one), float(two)]


def against(of: Products, chosen: np.ndarray, plain: np.ndarray) -> Errors:
    """How far predictions are off."""
    return errors([of.names[at] for at in chosen], plain[chosen], of.seconds[chosen])


def points_of(of: Products, plain: np.ndarray, on_host: np.ndarray) -> list[Point]:
    """Every product with its prediction, and where it is."""
    knobs, stored = typical(of.chip), precision(FORMATS[of.form])
    parts = of.table.seconds(knobs, layouts=False)
    narrow = stored.width < 8 * HALF and not stored.computes
    name = "int4" if narrow else StepCell.precision_of(widest("bf16", FORMATS[of.form]))
    found = []
    for number, row in enumerate(of.rows):
        compute, memory, device = (
            float(p[row]) for p in (parts.compute, parts.memory, parts.device)
        )
        limit = "compute" if compute > memory else "memory"
        if on_host[number] or 2 * device < plain[number]:
            limit = "launch"
        cell = StepCell(
            generation=StepCell.generation_of(of.chip), precision=name, phase="kernel",
            execution="eager" if of.least[number] else "graph", work="product", limit=limit,
        )  # fmt: skip
        group = f"{of.chip.name} {of.form}"
        seconds = float(of.seconds[number])
        point = Point(of.names[number], float(plain[number]), seconds, group)
        found.append(point.of(of.source, cell))
    return found


def main() -> None:
    given = parser_of(__doc__).parse_args()
    points: list[Point] = []
    notes: list[str] = []
    print(
        "| GPU | engine | format | rows | no fit | median | p90 | bias | one factor | two numbers |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for of in products_in(given.folder, notes):
        plain = of.predicted(typical(of.chip))
        on_host = plain < ABOVE * of.least
        plain = np.maximum(plain, of.least)
        points += [
            p for p, host in zip(points_of(of, plain, on_host), on_host, strict=True) if not host
        ]
        for what, chosen in (("", np.flatnonzero(~on_host)), (" (host)", np.flatnonzero(on_host))):
            if not len(chosen):
                continue
            no_fit = against(of, chosen, plain)
            fits = ""
            if not what:
                runs = [score(of, chosen, plain, seed) for seed in range(SEEDS)]
                fits = " | ".join(f"{statistics.fmean(r):.1%}" for r in zip(*runs, strict=True))
            print(
                f"| {of.chip.name} | {of.engine} | {of.form}{what} | {len(chosen)} "
                f"| {no_fit.mean:.1%} | {no_fit.median:.1%} | {no_fit.p90:.1%} "
                f"| {no_fit.bias:+.1%} | {fits or '- | -'} |"
            )
    print("".join(f"\n{note}" for note in notes), end="\n" if notes else "")
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
