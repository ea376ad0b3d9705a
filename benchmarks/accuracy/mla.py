"""Latent attention (MLA) that others measured, predicted by blocks, steps and bytes.

    python benchmarks/accuracy/mla.py FOLDER   # mla*.csv.gz in it and in kernels/

Rows are sizes and a latency in ms: a prompt (context), or one query on `step` cached latents
(generation), of DeepSeek's sizes: a latent of 512 and a rotated key of 64 for all heads, heads of
128 and 64 before they are projected.  `num_heads` are those of a process.  How rows were measured
is read off the collectors' sources (ai-dynamo/aiconfigurator, collector/{trtllm,sglang}/
collect_mla.py).  Generation is the absorbed form, on latents.  So is a prompt with SGLang on Hopper
and older GPUs; elsewhere a prompt has keys of 192 and values of 128 for each head.  A row has:

  the store      rotates and appends what is new; TensorRT-LLM's rotates queries, too,
  a plan         of a prompt: TensorRT-LLM's `invokeBuildDecoderInfo`,
  a cast         where the cache is fp8: TensorRT-LLM casts query, key and value of a prompt, to
                 multiply in fp8; SGLang's FlashAttention 3 multiplies in bf16, and casts the whole
                 cache to it before (`get_key_buffer(...).to(q.dtype)`),
  the attention  of FlashMLA, FlashAttention 3 or trtllm-gen, by engine and chip.

Numbers come along (`attention_knobs`); what is fitted is as in attention.py.
"""

from __future__ import annotations

from measured_kernels import WIDE, Kernel, Measured, asked, tables

from rooftrace.costmodels.kernels.attention_rows import library_on
from rooftrace.costmodels.ops.cost import AttentionSizes
from rooftrace.hardware.chip import Chip

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
"""Elements: of a latent, of a rotated key, of the rest of a key, and of a value of a head."""
UNVECTORISED = 0.3
"""Share of the bandwidth of a cast from fp8 that PyTorch's kernel loads byte by byte
(`unrolled_elementwise_kernel` with casts): SGLang's rows of H100 with an fp8 cache."""


def engine_of(row: dict[str, str]) -> str:
    """The engine of a row, one that executions know; vllm for any other."""
    name = row["framework"].lower().replace("-", "")
    return name if name in ("vllm", "sglang", "trtllm") else "vllm"


def measured(row: dict[str, str], chip: Chip, source: str) -> Measured:
    """The kernels of a row."""
    batch, heads = int(row["batch_size"]), int(row["num_heads"])
    prompt = "context" in row["op_name"]
    engine, narrow = engine_of(row), "fp8" in row["kv_cache_dtype"]
    latent = library_on("triton" if "triton" in row["kernel_source"] else engine, chip, latent=True)
    absorbed = not prompt or (engine == "sglang" and latent != "trtllm-mla")
    queries = int(row["isl"]) if prompt else 1
    keys = queries if prompt else int(row["step"]) + 1
    visible = queries * (queries + 1) // 2 if prompt else keys
    casts_cache = narrow and latent in ("flash3-mla", "triton")
    size = 2 if casts_cache or not narrow else 1
    precision = "fp8" if size < WIDE else "bf16"
    tokens, cached = batch * queries, batch * keys
    new = tokens * (LATENT + ROPE) * (WIDE + (1 if narrow else 2))
    kernels = []
    if absorbed:
        width, value, kv_heads, library = LATENT + ROPE, LATENT, 1, latent
        turned = tokens * heads * width if engine == "trtllm" else 0
        read = cached * width * size + tokens * heads * (width + value) * WIDE
        if casts_cache:
            kernels.append(Kernel("cast", cached * width * (1 + WIDE) / UNVECTORISED))
    else:
        width, value, kv_heads, library = NOPE + ROPE, VALUE, heads, library_on(engine, chip)
        turned = tokens * heads * 2 * ROPE
        read = tokens * heads * ((2 * width + value) * size + value * WIDE)
        if narrow:
            kernels.append(Kernel("cast", tokens * heads * (2 * width + value) * (1 + WIDE)))
    sizes = AttentionSizes(
        batch, queries, keys, visible, heads, kv_heads, width, value, size, paged=True
    )
    kernels.append(Kernel("gather", new + 2 * WIDE * turned))
    if engine == "trtllm" and prompt:
        kernels.append(Kernel("gather", 0))
    kernels.append(Kernel("attention", read, sizes, precision, library))
    return Measured(
        name=f"{batch}x{queries}x{keys} {heads} heads {'fp8' if narrow else 'bf16'}",
        source=source,
        phase="context" if prompt else "generation",
        cache="fp8" if narrow else "bf16",
        library=f"{engine} {library}",
        seconds=float(row["latency"]) * 1e-3,
        kernels=tuple(kernels),
    )


def main() -> None:
    tables(asked(__doc__), "mla*.csv.gz", measured, "mla")


if __name__ == "__main__":
    main()
