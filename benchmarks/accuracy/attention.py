"""Attention kernels that others measured, predicted by blocks, steps and bytes.

    python benchmarks/accuracy/attention.py FOLDER   # attention-*.csv.gz in it and in kernels/
    python benchmarks/accuracy/attention.py FOLDER --refit   # the constants of attention_rows.py

Rows are sizes and a latency in ms, of a library's kernels in an engine: prompts (context) and one
query on a cache (generation); the GPU is in `device`.  A row has attention, and the kernel that
stores new entries in the cache, a row of class "gather" here.  Numbers come along
(`attention_knobs`), and are the same for all GPUs of a generation; one factor, or two numbers
(what the chip sustains of its arithmetic and its bandwidth), are fitted to one half of the rows of
a library and predict the other, both ways.  FlashAttention 4, which is not
modelled (on Hopper it serves heads of width 512), stands in lines of its kind, priced as vLLM's
usual library; so is any unknown one.

The cache of L40S and B200 is so large that it holds what most rows touch, over and over: such rows
are warm there, at the rate of L40S's cache (`CACHE`).
"""

from __future__ import annotations

from measured_kernels import WIDE, Kernel, Measured, asked, stored, tables

from rooftrace.costmodels.kernels.attention import attention_engine
from rooftrace.costmodels.kernels.attention_rows import library_on
from rooftrace.costmodels.ops.cost import AttentionSizes
from rooftrace.hardware.chip import Chip

SOURCES = (
    ("fa2", "flash2"), ("fa3", "flash3"), ("fa4", "flash4"), ("trtllm", "trtllm"),
    ("triton", "triton"), ("flashinfer", "flashinfer"), ("flash_attention", "flash3"),
)  # fmt: skip
"""Words in the name of a row's kernel, and the library."""


def library_of(row: dict[str, str], chip: Chip) -> str:
    """The library whose kernel ran: by the name of the kernel, else the engine's usual one."""
    source = row["kernel_source"].lower()
    found = next((library for word, library in SOURCES if word in source), "")
    on = attention_engine(chip)
    if found == "flashinfer" and on is not None and on.family == "blackwell":
        found = "trtllm"  # flashinfer runs trtllm-gen's kernels there
    engine = row["framework"].lower().replace("-", "")
    usual = engine if engine in ("vllm", "sglang", "trtllm") else "vllm"
    return found if found == "flash4" else library_on(found or usual, chip)


def measured(row: dict[str, str], chip: Chip, source: str) -> Measured:
    """An attention and a store; both phases store what they are given."""
    batch, heads, width = (int(row[name]) for name in ("batch_size", "num_heads", "head_dim"))
    kv_heads = int(row["num_key_value_heads"]) or heads
    prompt = row["op_name"].startswith("context")
    queries = int(row["isl"]) if prompt else 1
    window = int(row.get("window_size") or 0) or 2**40
    keys = queries if prompt else min(int(row["step"]) + 1, window)
    full, rest = min(queries, window), max(0, queries - window)
    visible = full * (full + 1) // 2 + rest * full if prompt else keys
    narrow = "fp8" in row["kv_cache_dtype"]
    size = 1 if narrow else 2
    precision = "fp8" if narrow or "fp8" in row["attn_dtype"] else "bf16"
    sizes = AttentionSizes(
        batch, queries, keys, visible, heads, kv_heads, width, width, size, paged=True
    )
    library = library_of(row, chip)
    priced = library_on("vllm", chip) if library == "flash4" else library
    read = 2 * batch * (queries * heads * width * WIDE + keys * kv_heads * width * size)
    kernels: tuple[Kernel, ...] = (
        Kernel("attention", read, sizes, precision, priced),
        stored(chip, batch * queries, 2 * kv_heads * width, size),
    )
    if queries == 1 and library in ("flashinfer", "triton"):  # adds up parts, however many
        kernels = (*kernels, Kernel("gather", 0))
    return Measured(
        name=f"{batch}x{queries}x{keys} {heads}/{kv_heads} of {width} {precision}",
        source=source,
        phase="context" if prompt else "generation",
        cache="fp8" if narrow else "bf16",
        library=library,
        seconds=float(row["latency"]) * 1e-3,
        kernels=kernels,
    )


def main() -> None:
    tables(asked(__doc__), "attention-*.csv.gz", measured, "attention")


if __name__ == "__main__":
    main()
