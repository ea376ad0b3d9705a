"""Prefill and decode of GPT-2 by its config, on three chips.  No weights, no GPU."""

# %%
import rooftrace as rt

graphs = rt.tools.trace_target("gpt2", ["prefill", "decode"], rt.types.Request(batch=8, seq=255))

# %%
print(f"{'':24} {'prefill':>12} {'decode':>12}   limited by (decode)")
for chip in ("h200-sxm", "l4", "rtx-4090"):
    for execution in ("eager", "efficient"):
        prefill, decode = (
            rt.estimate(rt.tools.reprice(graph, "bf16"), chip, execution)
            for graph in graphs.values()
        )
        print(
            f"{chip:12} {execution:11} {prefill.t_est * 1e3:9.3f} ms {decode.t_est * 1e3:9.3f} ms"
            f"   {decode.times.regime} {decode.times.regime_shares[decode.times.regime]:.0%}"
        )

# %% [markdown]
# Any of these results shows its table and its figure, for example the last one.

# %% tags=["active-ipynb"]
# decode
