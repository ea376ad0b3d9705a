"""Which library's attention kernel runs, and what measurements tell of each.

An execution names the library (`ExecutionModel.attention_library`).  Two names stand for what a
program runs on the chip at hand: "sdpa" is the flash kernel of `scaled_dot_product_attention`,
which is FlashAttention 2 on every GPU, and "vllm" is FlashAttention 3 where the chip has the
instructions for it (FlashAttention 2 elsewhere).
"""

from __future__ import annotations

from dataclasses import replace

from rooftrace.costmodels.kernels.attention_time import attention_engine
from rooftrace.costmodels.knobs import AttentionKnobs
from rooftrace.hardware import Chip

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
