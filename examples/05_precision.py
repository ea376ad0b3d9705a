"""Decode of Llama-3.1-8B with weights and cache in lower precisions, re-priced from one trace."""

# %%
import rooftrace as rt

config = "llama-3.1-8b"  # one that comes along; the path of a config.json does as well
(graph,) = rt.tools.trace_target(
    config, ["decode"], rt.types.Request(batch=16, seq=128, kv=4096)
).values()

# %%
print(f"{'weights':>8} {'cache':>8} {'weight bytes':>14} {'cache bytes':>12} {'tokens/s':>9}")
for weights, cache in ((None, None), ("fp8", None), ("fp8", "fp8"), ("nvfp4", "fp8")):
    estimate = rt.estimate(
        rt.tools.reprice(graph, weights_dtype=weights, kv_dtype=cache), "h100-sxm"
    )
    print(
        f"{weights or 'bf16':>8} {cache or 'bf16':>8} {estimate.bytes.weights / 1e9:11.2f} GB"
        f" {estimate.bytes.kv / 1e9:9.2f} GB {estimate.items_per_s:9.0f}"
    )

# %% [markdown]
# The last of them, with the cache in fp8 and the weights in NVFP4.

# %% tags=["active-ipynb"]
# estimate
