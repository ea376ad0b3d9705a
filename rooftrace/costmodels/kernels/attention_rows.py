"""Attention in a table of kernels: its columns there, and the seconds of its rows.

What a rule says of an attention op (`AttentionSizes` of its work) is a group of columns, all zero
in the rows of other kernels.  Rows whose products run on the matrix engine of a chip with a known
SM count take the seconds of `attention_time`; backward and all else keep the shares of their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import AttentionSizes
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.attention_time import (
    LIBRARIES,
    AttentionSeconds,
    attention_engine,
    attention_seconds,
)
from rooftrace.costmodels.kernels.engines import TILED, engine_of
from rooftrace.costmodels.knobs import AttentionKnobs, Knobs
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import precision

if TYPE_CHECKING:
    from rooftrace._amounts import Array
    from rooftrace.costmodels.kernels.works import KernelAmounts

# -- which library's kernel runs -------------------------------------------------------------------
# What measurements tell of each.
#
# An execution names the library (`ExecutionModel.attention_library`).  Two names stand for what a
# program runs on the chip at hand: "sdpa" is the flash kernel of `scaled_dot_product_attention`,
# which is FlashAttention 2 on every GPU, and "vllm" is FlashAttention 3 where the chip has the
# instructions for it (FlashAttention 2 elsewhere).

SDPA = "sdpa"
"""Stands for the library whose kernel PyTorch's `scaled_dot_product_attention` runs."""
WIDE = ("flash2", "flashinfer", "triton")
"""Libraries that multiply in half precision: entries of an fp8 cache are converted first."""
HOPPER = AttentionKnobs(
    products=1.0, convert=0.65, stream=0.91,
    start=1.6e-6, combine=1.5e-6, prepare=1.3e-6, request=1.3e-8,
)  # fmt: skip
"""FlashAttention 3 in vLLM 0.24 on H100 and H200, by benchmarks/accuracy/attention.py on published
measurements (aiconfigurator's performance database, Apache-2.0).  The two GPUs' fits agree within
an eighth, `request` and `combine` within a third.  `products` stays at the datasheet's rate; left
free it is 1.1, with 0.78 for `convert`.  `stream` is over the 0.91 that copies reach there."""
AMPERE = AttentionKnobs(
    products=0.9, stream=0.82, start=1.3e-6, combine=7.1e-6, prepare=6.9e-6, request=6e-9
)
"""FlashAttention 2 in vLLM 0.14 on A100, from the same source; fp8 caches were not measured.
`products` and the instructions of its kernel stand for each other there, since all heads are of one
width.  Both are over what `Knobs.typical` says that A100 sustains (1.12 and 0.85): of the
datasheet they are 1.0 and 0.7."""
GEFORCE = replace(AMPERE, products=1.0, stream=0.7)
"""FlashAttention 2 on other GPUs: with products at their full rate the growth of published step
times of eva and eva02 (timm, RTX 3090 and 4090) over image sizes is met within 1 %.  What the
kernel for masks of numbers takes (`EFFICIENT.vector`) is from that of tiny_vit: 60 on RTX 4090, 110
on RTX 3090."""
OLD_INSTRUCTIONS = replace(HOPPER, products=0.62, convert=0.0, start=1.3e-6, combine=3e-6)
"""FlashAttention 2 on Hopper.  It uses the matrix instructions of sm_80, which reach 0.62 of the
rate there (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
Microbenchmarking", 2024).  The rest is that of the same chips."""
FLASHINFER = replace(GEFORCE, products=0.76, stream=0.82, combine=3e-6, prepare=1.7e-6)
TRITON = replace(GEFORCE, products=0.28, stream=0.86, start=5.9e-7, combine=7.2e-7, prepare=0.0)
"""Kernels of flashinfer and of vLLM's Triton backend, both with fp8 caches on L40S: from the same
source, over the 0.74 that L40S sustains of its matrix rate."""


def library_on(name: str, chip: Chip) -> str:
    """The library, one of LIBRARIES, that a name stands for on a chip."""
    on = attention_engine(chip)
    hopper = on is not None and on.warp_groups
    if name == "vllm":
        name = "flash3"
    if name == SDPA or (name in ("flash3", "cudnn") and not hopper):
        return "flash2"
    return name


def attention_knobs(
    numbers: AttentionKnobs | str, chip: Chip, library: str = SDPA
) -> AttentionKnobs:
    """The numbers themselves; for "usual", those of the library's kernels on chips like this one.

    library: one of ATTENTION_LIBRARIES.
    """
    if isinstance(numbers, AttentionKnobs):
        return numbers
    on, library = attention_engine(chip), library_on(library, chip)
    if library in ("flashinfer", "triton"):
        return FLASHINFER if library == "flashinfer" else TRITON
    if on is not None and on.warp_groups:
        return OLD_INSTRUCTIONS if library == "flash2" else HOPPER
    return AMPERE if on is not None and on.wide else GEFORCE


# -- rows ------------------------------------------------------------------------------------------

_SIZES = tuple(AttentionSizes.__struct_fields__)
COLUMNS = ("kernels", *_SIZES, "size", "rate", "library")
"""kernels: attention kernels in one of the row's (0: none).  size: bytes of an element that is
multiplied.  rate: FLOP/s of the products, 0 where they do not run on the matrix engine in half
precision or less.  library: the place in LIBRARIES of whose kernel it is."""
_WIDEST = 2
"""Bytes of an element that kernels multiply whose tiles are known."""


def products_of(engine: str, name: str, chip: Chip, library: str) -> tuple[float, float, float]:
    """The columns size, rate and library of products of this precision on this engine."""
    library = library_on(library, chip)
    size = float(precision(name).bits / 8)
    if library in WIDE and size < _WIDEST and chip.has_peak(engine, "bf16"):
        name, size = "bf16", float(_WIDEST)
    rate = chip.peak(engine, name) if engine == "matrix" and size <= _WIDEST else 0.0
    return size, rate, LIBRARIES.index(library)


def columns_of(kernels: KernelAmounts, chip: Chip, execution: ExecutionModel) -> dict[str, Array]:
    """The columns of kernels: those of the largest attention of each row."""
    import numpy as np

    columns = {name: np.zeros(len(kernels)) for name in COLUMNS}
    most = np.zeros(len(kernels))
    for work in kernels.attention:
        assert work.attention is not None
        sizes, at = work.attention, work.row
        engine = engine_of(work.key, chip, execution)
        size, rate, library = products_of(*engine, chip, execution.attention_library)
        each: Any = AttentionSizes(**sizes).flop  # type: ignore[arg-type]
        count = np.maximum(1.0, np.rint(work.flop / np.maximum(each, 1)))
        equal = (work.flop == most[at]) & (sizes["keys"] > columns["keys"][at]) & (work.flop > 0)
        larger = (work.flop > most[at]) | equal
        numbers = {**sizes, "kernels": count, "size": size, "rate": rate, "library": library}
        for name, column in columns.items():
            column[at] = np.where(larger, numbers.get(name, 0.0), column[at])
        most[at] = np.where(larger, work.flop, most[at])
    return {f"attention {name}": column for name, column in columns.items()}


def attention_seconds_of(
    data: Mapping[str, Array], bytes_: Array, chip: Chip, knobs: Knobs
) -> tuple[Array, AttentionSeconds] | None:
    """The rows of a table that are priced by blocks, with their seconds; None without such rows.

    bytes_: through HBM, by row.
    """
    import numpy as np

    on = attention_engine(chip)
    rows: Any = np.flatnonzero((data["attention rate"] > 0) & (data["attention backward"] == 0))
    if on is None or not len(rows):
        return None
    sizes = {name: data[f"attention {name}"][rows] for name in COLUMNS}
    kernels = sizes["kernels"]
    sizes["bytes"] = bytes_[rows] / kernels
    seconds = AttentionSeconds(*(np.zeros(len(rows)) for _ in range(3)))
    for place, library in enumerate(LIBRARIES):
        numbers = attention_knobs(knobs.attention, chip, library)
        chosen = np.flatnonzero(sizes["library"] == place)
        for part in np.split(chosen, range(TILED, len(chosen), TILED)):
            cases = {name: column[part] for name, column in sizes.items()}
            if len(part):
                single = attention_seconds(
                    cases, on, numbers, knobs.compute, knobs.memory, knobs.overlap
                )
                for name in ("compute", "memory", "device"):
                    getattr(seconds, name)[part] = kernels[part] * getattr(single, name)
    return rows, seconds
