"""Which engine of a chip does which work, and how long it takes by the chip's peaks."""

from __future__ import annotations

import math
from typing import Any

from rooftrace.costmodels.costs import Work
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.utilization import LEAST
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.precisions import compute_family, precision
from rooftrace.hardware.units import format_traffic

STREAMING = ("vector", "fp32")
"""The engine and precision of a product that streams one matrix past a few vectors."""

WAIT = 280e-9
"""Seconds that a thread of a GPU waits for what it loads.  Steps of efficientformerv2 on RTX 3090
and 4090, most of whose time is upsampling, take 250 to 300 ns for each value of a thread."""


def reached(rows: Any, inner: Any, chip: Chip) -> Any:
    """FLOP/s that threads reach which wait for memory; infinite where nothing says how many.

    rows, inner: of vector work (see `Work`), numbers or arrays.
    """
    if rows is None or inner is None or chip.kind != "gpu":
        return math.inf
    return rows * inner / WAIT


def engine_of(work: Work, chip: Chip, execution: ExecutionModel) -> tuple[str, str]:
    """The (engine, precision) that runs this work.

    fp32 matmul runs on the vector engine and fp32 convolution on TF32, as torch's defaults are on a
    chip that has TF32; `tf32` sends matmul there too.  Complex products run as those of their
    parts.  fp64 products use the matrix engine where the chip has an fp64 rate for it.  Products of
    quantised weights that round their activations run on that engine where the chip has it, else
    they widen the weights (see `hardware.precisions`).
    """
    if work.operation == "vector":
        return "vector", work.precision
    name = precision_on(chip, work.precision)
    family = compute_family(name)
    if family == "fp32":
        wants_tf32 = work.operation == "convolution" or execution.tf32
        if wants_tf32 and chip.has_peak("matrix", "tf32"):
            return "matrix", "tf32"
        return "vector", "fp32"
    if family == "fp64" and not chip.has_peak("matrix", "fp64"):
        return "vector", "fp64"
    return "matrix", name


def precision_on(chip: Chip, name: str) -> str:
    """What products of this precision compute in on a chip: bf16_afp8 is fp8, or bf16 without."""
    known = precision(name)
    if not known.computes:
        return name
    return known.computes if chip.has_peak("matrix", known.computes) else known.element


def product_engine(work: Work, chip: Chip, execution: ExecutionModel) -> tuple[str, str]:
    """The (engine, precision) of a product; `engine_of` says it for all but small ones on GPUs.

    A product of fewer rows or columns than a matrix instruction has streams one matrix past a few
    vectors.  It runs on the vector engine where that is faster than mostly empty instructions.
    """
    engine = engine_of(work, chip, execution)
    if engine[0] == "vector" or work.operation != "matmul" or work.shape is None:
        return engine
    few = min(work.shape[:2])
    return STREAMING if 0 < few < LEAST and few < streamed_below(engine, chip) else engine


def streamed_below(engine: tuple[str, str], chip: Chip) -> float:
    """Below how many rows, or columns, a product of this matrix engine streams; 0: none does.

    r vectors take as long as on the vector engine where its rate / r is the matrix engine's rate /
    LEAST; whole instructions hold LEAST or more.
    """
    if chip.kind != "gpu" or not chip.has_peak(*STREAMING):
        return 0.0
    return min(float(LEAST), LEAST * chip.peak(*STREAMING) / chip.peak(*engine))


def stored_widths(work: Work) -> tuple[float, float]:
    """Bytes of an element of A and of B of a product, as they are stored."""
    computed = float(precision(work.precision).bits / 8)
    return work.widths or (computed, computed)


def link_bandwidth(moved: float, chip: Chip) -> float:
    """Byte/s of the chip's link.  Raises MissingPeakError if `moved` bytes need one it lacks."""
    if moved and not chip.links:
        raise MissingPeakError(
            f"{chip.name} has no link, and the step moves {format_traffic(moved)} over one: "
            "add a [[link]] to its TOML file"
        )
    return max((link.bandwidth.value for link in chip.links), default=math.inf)
