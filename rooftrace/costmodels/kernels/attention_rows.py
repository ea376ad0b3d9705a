"""Whose attention kernels run on a chip, their numbers, and their rows in a table of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.kernels.attention import (
    LIBRARIES,
    attention_engine,
    attention_seconds,
    is_latent,
)
from rooftrace.costmodels.kernels.engines import engine_of
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.kernels.numbers import AttentionKnobs
from rooftrace.costmodels.kernels.tiles import OwnSeconds
from rooftrace.costmodels.ops import AttentionSizes
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import precision

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array
    from rooftrace.costmodels.kernels.works import KernelAmounts

# -- attention rows --------------------------------------------------------------------------------
# `AttentionSizes` of a kernel's work are columns of a table of kernels, zero in the rows of other
# kernels.  Rows whose products run on the matrix engine of a chip with an SM count take the seconds
# of `attention_seconds`; backward and all else keep the shares of their class.

# -- which library's kernel runs -------------------------------------------------------------------
# An execution names the library (`ExecutionModel.attention_kernels`).  Names of `_CHOICES` are of
# engines, and the kernel depends on the chip: "sdpa" is `scaled_dot_product_attention` of PyTorch,
# FlashAttention 2, and cuDNN's on Hopper and Blackwell (`check_prefer_cudnn_attention` in
# sdp_utils.cpp; on Hopper since 2.11); the engines choose FlashAttention 3 on Hopper, and
# trtllm-gen on Blackwell.  Attention on latents has kernels of its kind.

SDPA = "sdpa"
"""The library whose kernel PyTorch's `scaled_dot_product_attention` runs."""
WIDE = ("flash2", "flashinfer", "triton")
"""Libraries that multiply in half precision: entries of an fp8 cache are converted first."""
HOPPER = AttentionKnobs(
    products=1.15, convert=0.67, stream=1.05,
    start=1.45e-6, combine=1.9e-6, prepare=1.2e-6, request=2e-8,
)  # fmt: skip
"""FlashAttention 3 in vLLM 0.24 on H100 and H200, by benchmarks/accuracy/attention.py on published
measurements (aiconfigurator's performance database, Apache-2.0).  The two GPUs' fits agree within
an eighth, `combine` and `convert` within a fifth.  `stream` is over the 0.91 that copies reach
there: 0.95 of the datasheet's bandwidth is what caches of a gigabyte do."""
AMPERE = AttentionKnobs(
    products=0.9, stream=0.97, start=1.2e-6, combine=6.9e-6, prepare=6.9e-6, request=6.5e-9
)
"""FlashAttention 2 in vLLM 0.14 on A100, from the same source; fp8 caches were not measured.
`products` and the instructions of its kernel stand for each other there, since all heads are of one
width.  Both are over the sustained rates of A100 in `Knobs.typical` (1.12 and 0.85): of the
datasheet they are 1.0 and 0.82."""
GEFORCE = AttentionKnobs(
    products=1.0, stream=0.82, start=1.5e-6, combine=3.9e-6, prepare=3.8e-6, request=1e-9
)
"""FlashAttention 2 on other GPUs, in vLLM 0.24 on L40S, from the same source, over the 0.74 that
L40S sustains of its matrix rate; `products` is 0.99 there, and with its full rate the growth of
published step times of eva and eva02 (timm, RTX 3090 and 4090) over image sizes is met within 1 %.
What the kernel for masks of numbers takes (`EFFICIENT.vector`) is from that of tiny_vit: 60 on RTX
4090, 110 on RTX 3090."""
ADA = replace(GEFORCE, products=0.66, stream=0.84, start=1.2e-6, combine=4.6e-6, prepare=3.7e-6)
"""The same on L40S with a paged cache, and with its limit on power (`Knobs.power`), which slows
this kernel by less than products: one half of those rows, refitted by attention.py."""
OLD_INSTRUCTIONS = replace(HOPPER, products=0.62, convert=0.0, start=1.3e-6, combine=3e-6)
"""FlashAttention 2 on Hopper.  It uses the matrix instructions of sm_80, which reach 0.62 of the
rate there (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
Microbenchmarking", 2024).  The rest is that of the same chips."""
CUDNN_HOPPER = replace(HOPPER, products=1.5)
"""cuDNN 9.19 on H200 and H100: 95 prompts (`rooftrace measure`, 2026-11-27, and benchmarks/kernels,
2026-11-26), which are met within 9 % (mean), 13 of H100 as those of H200.  The rest is that of
HOPPER; calls for one query take 0.84 to 1.65 times what follows."""
FLASHINFER_RATES = AttentionKnobs(
    products=0.81, stream=0.82, start=3e-6, combine=1.9e-6, merge=2.1e-7, request=2e-9
)
TRITON_RATES = AttentionKnobs(
    products=0.325, stream=0.865, start=8.4e-7, combine=4e-8, merge=5e-7, request=1e-9
)
"""Kernels of flashinfer and of vLLM's Triton backend, both with fp8 caches on L40S: one half of
rows of the same source, refitted by attention.py, over what L40S sustains of its matrix rate."""
ROCM_RATES = AttentionKnobs(stream=0.65, start=1.5e-6, combine=5e-6)
"""Paged attention on MI300X: 36 calls in a step of decode of Qwen3-8B under SGLang (32 requests,
32,785 keys; trace of TraceLens, MIT).  `start` is a guess near that of other GPUs, and no prompt
was measured."""
AOTRITON_RATES = replace(ROCM_RATES, start=1.5e-5)
"""attn_fwd on MI300X: 40 calls in steps of ViT, BERT and Qwen1.5 (traces of TraceLens, MIT), with
141, 197 and 559 keys and heads of 64.  So is the number of its instructions (`vector`)."""
TRTLLM_HOPPER = AttentionKnobs(
    products=0.96, convert=0.29, stream=1.05, start=1.1e-6, combine=1.9e-6, request=1.5e-8
)
TRTLLM_GEN = AttentionKnobs(products=1.35, stream=1.05, start=2e-6, combine=1.4e-6, request=1.5e-8)
"""TensorRT-LLM 1.3: prompts of MLA on H200 and on B200 (the same source, benchmarks/accuracy/
mla.py), but for `combine` and `request`, which are those of HOPPER, and of decode below."""
FLASHMLA_RATES = AttentionKnobs(
    products=0.96, convert=0.12, stream=1.05, start=2e-6, combine=3.4e-6, request=1.6e-8
)
FLASH3_MLA = AttentionKnobs(
    products=0.75, stream=1.05, start=2.2e-6, combine=4.6e-6, request=1.9e-8
)
TRTLLM_MLA_RATES = AttentionKnobs(products=1.35, stream=1.05, combine=1.4e-6, request=1.5e-8)
"""Attention on latents: of FlashMLA in TensorRT-LLM on H200, of FlashAttention 3 in SGLang on H100
(prompts, too), and of trtllm-gen on B200, from the same source.  trtllm-gen's `products` are those
of its prompts: what feeds them (`TRTLLM_MLA.feed`) is slower."""
RATES: Mapping[str, AttentionKnobs] = {
    "flashinfer": FLASHINFER_RATES, "triton": TRITON_RATES,
    "aotriton": AOTRITON_RATES, "rocm": ROCM_RATES,
    "flashmla": FLASHMLA_RATES, "flash3-mla": FLASH3_MLA, "trtllm-mla": TRTLLM_MLA_RATES,
}  # fmt: skip
"""Of libraries that have the same numbers on every chip."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    SDPA: ("flash2", "cudnn", "cudnn", "aotriton"),
    "vllm": ("flash2", "flash3", "trtllm", "rocm"),
    "sglang": ("flashinfer", "flash3", "trtllm", "rocm"),
    "trtllm": ("trtllm", "trtllm", "trtllm", "rocm"),
    "flash3": ("flash2", "flash3", "trtllm", "rocm"),
    "flashmla": ("flash2", "flash3", "trtllm", "rocm"),
    "cudnn": ("flash2", "cudnn", "cudnn", "rocm"),
}
"""By name: the kernels on other GPUs, on Hopper, on Blackwell, on AMD's."""
_LATENT_CHOICES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("triton", "flashmla", "trtllm-mla", "rocm"),
    "sglang": ("triton", "flash3-mla", "trtllm-mla", "rocm"),
    "trtllm": ("flashmla", "flashmla", "trtllm-mla", "rocm"),
    "flashmla": ("triton", "flashmla", "trtllm-mla", "rocm"),
    "flash3": ("triton", "flash3-mla", "trtllm-mla", "rocm"),
}
_FAMILIES = ("", "hopper", "blackwell", "rocm")


def library_on(name: str, chip: Chip, latent: bool = False) -> str:
    """The library, one of LIBRARIES, that a name stands for on a chip; latent: for MLA's cache."""
    on = attention_engine(chip)
    family = _FAMILIES.index("" if on is None else on.family)
    if latent and name in _LATENT_CHOICES:
        return _LATENT_CHOICES[name][family]
    return _CHOICES[name][family] if name in _CHOICES else name


def attention_knobs(
    numbers: AttentionKnobs | str, chip: Chip, library: str = SDPA
) -> AttentionKnobs:
    """The numbers themselves; for "usual", those of the library's kernels on such chips.

    library: one of ATTENTION_LIBRARIES.
    """
    if isinstance(numbers, AttentionKnobs):
        return numbers
    if library not in RATES:
        library = library_on(library, chip)
    on = attention_engine(chip)
    family, wide = ("", False) if on is None else (on.family, on.wide)
    nvidia = family in ("hopper", "blackwell")
    card = ADA if Knobs.generation(chip) == "ada" else GEFORCE
    flash2 = OLD_INSTRUCTIONS if nvidia else AMPERE if wide else card
    if library == "flash2":
        return flash2
    if wide and library in ("flashinfer", "triton"):
        # Of memory whose copies are slower than its datasheet says, they reach what others do; and
        # flashinfer's products in half precision are those of FlashAttention 2.
        rates = replace(RATES[library], stream=flash2.stream)
        return replace(rates, products=flash2.products) if library == "flashinfer" else rates
    if library in RATES:
        return RATES[library]
    if library == "cudnn" and family == "hopper":
        return CUDNN_HOPPER
    if library == "trtllm" and family != "blackwell":
        return TRTLLM_HOPPER if nvidia else replace(flash2, prepare=0.0)
    return TRTLLM_GEN if family == "blackwell" else HOPPER if nvidia else flash2


# -- rows ------------------------------------------------------------------------------------------

_SIZES = tuple(AttentionSizes.__struct_fields__)
COLUMNS = ("kernels", *_SIZES, "size", "rate", "library")
"""kernels: attention kernels in one of the row's (0: none).  size: bytes of an element that is
multiplied.  rate: FLOP/s of the products, 0 where they do not run on the matrix engine in half
precision or less.  library: the place in LIBRARIES of whose kernel it is."""
_WIDEST = 2
"""Bytes of the widest element that modelled kernels multiply."""


def products_of(
    engine: str, name: str, chip: Chip, library: str, latent: bool = False
) -> tuple[float, float, float]:
    """The columns size, rate and library of products of this precision on this engine."""
    library = library_on(library, chip, latent)
    size = float(precision(name).bits / 8)
    if library in WIDE and size < _WIDEST and chip.has_peak(engine, "bf16"):
        name, size = "bf16", float(_WIDEST)
    rate = chip.peak(engine, name) if engine == "matrix" and size <= _WIDEST else 0.0
    return size, rate, LIBRARIES.index(library)


def columns_of(kernels: KernelAmounts, chip: Chip, execution: ExecutionModel) -> dict[str, Array]:
    """The columns of kernels: those of the largest attention of each row."""
    columns = {name: np.zeros(len(kernels)) for name in COLUMNS}
    most = np.zeros(len(kernels))
    for work in kernels.attention:
        assert work.attention is not None
        sizes, at = work.attention, work.row
        engine = engine_of(work.key, chip, execution)
        of = execution.attention_kernels
        plain, latent = (products_of(*engine, chip, of, kind) for kind in (False, True))
        size, rate, library = np.where(is_latent(sizes), np.array([latent]).T, np.array([plain]).T)
        each: Any = AttentionSizes(**sizes).flop  # type: ignore[arg-type]
        count = np.maximum(1.0, np.rint(work.flop / np.maximum(each, 1)))
        equal = (work.flop == most[at]) & (sizes["keys"] > columns["keys"][at]) & (work.flop > 0)
        larger = (work.flop > most[at]) | equal
        numbers = {**sizes, "kernels": count, "size": size, "rate": rate, "library": library}
        for name, column in columns.items():
            column[at] = np.where(larger, numbers.get(name, 0.0), column[at])
        most[at] = np.where(larger, work.flop, most[at])
    return {f"attention {name}": column for name, column in columns.items()}


def backward_shares(data: Mapping[str, Array], chip: Chip) -> Amount:
    """Shares of the rate of the class, by row, that backward kernels reach: those of instructions.

    FlashAttention 2 uses the matrix instructions of sm_80 in backward as in forward.
    """
    on = attention_engine(chip)
    if on is None or on.family not in ("hopper", "blackwell"):
        return 1.0
    flash2 = data["attention library"] == LIBRARIES.index("flash2")
    old = (data["attention backward"] > 0) & flash2
    return np.where(old, OLD_INSTRUCTIONS.products, 1.0)


def attention_seconds_of(
    data: Mapping[str, Array], bytes_: Array, chip: Chip, knobs: Knobs
) -> tuple[Array, OwnSeconds] | None:
    """The rows of a table that are priced by blocks, with their seconds; None without such rows.

    bytes_: through HBM, by row.
    """
    on = attention_engine(chip)
    rows: Any = np.flatnonzero((data["attention rate"] > 0) & (data["attention backward"] == 0))
    if on is None or not len(rows):
        return None
    sizes = {name: data[f"attention {name}"][rows] for name in COLUMNS}
    kernels = sizes["kernels"]
    sizes["bytes"] = bytes_[rows] / kernels

    def price(place: int, at: Array) -> OwnSeconds:
        cases = {name: column[at] for name, column in sizes.items()}
        numbers = attention_knobs(knobs.attention, chip, LIBRARIES[place])
        single = attention_seconds(
            cases, on, numbers, knobs.compute, knobs.memory, knobs.overlap, knobs.cache
        )
        return OwnSeconds(*(kernels[at] * each for each in astuple(single)))

    return rows, OwnSeconds.by_place(sizes["library"], price)
