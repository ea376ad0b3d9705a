"""The preset `serving` beside published figures of an inference engine.

    python benchmarks/serving/run.py > docs/serving-published.md
    make serving

published.csv has figures of NVIDIA's TensorRT-LLM (docs/source/performance.md, releases 0.5 and
0.6.1): output tokens per second of one GPU with a fixed batch, and the latency of the first token.
A run is a prefill and `output` decode steps, whose time grows in a straight line with the cache: so
their sum is `output` times the step in the middle.  Nothing is fitted to these rows.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import rooftrace as rt

HERE = Path(__file__).parent
HEAD = """# Serving beside published figures

`make serving` writes this page. The figures are NVIDIA's, of TensorRT-LLM
(docs/source/performance.md of its repository; releases 0.5 and 0.6.1), on one GPU: output tokens
per second with a fixed batch, prompt and output, and the latency of the first token. Predictions
are those of the preset [`serving`](serving.md) with typical knobs: a prefill, and as many decode
steps as there are output tokens, each with the cache that it has on average. No number was fitted
to these rows or these GPUs. One rewrite was mended with the rows of GPT-J in sight: a cast of the
whole cache, which its module writes and no engine runs.
"""
COLUMNS = ("model", "GPU", "precision, cache", "batch", "prompt", "output", "measured", "expected",
           "90 % within", "bound", "error", "inside")  # fmt: skip
FOOT = """
Outside are the first tokens in fp8 on H100, of the first release that ran on it: a single prompt
took as long as at half of the rate that the products of its batches reach. Outside are also two
runs of llama-7b in fp8 on H100, which were faster than predicted."""


def model_of(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model that was measured, on the meta device."""
    if name == "gpt-j-6b":
        config: Any = transformers.GPTJConfig(n_positions=4096)
        kind: Any = transformers.GPTJForCausalLM
    else:
        config = transformers.LlamaConfig(max_position_embeddings=4096)
        kind = transformers.LlamaForCausalLM
    with torch.device("meta"):
        return kind(config).to(dtype).eval()  # type: ignore[no-any-return]


def seconds(row: Mapping[str, str]) -> tuple[float, float, float, float]:
    """Expected, least and most seconds of a run, and the bound."""
    batch, prompt, output = (int(row[key]) for key in ("batch", "input", "output"))
    precisions = {"dtype": row["dtype"], "kv_dtype": row["kv_dtype"]}
    model = model_of(row["model"], torch.float16)
    about = {"chip": row["chip"], "execution": "serving"}
    first = rt.estimate(model, batch=batch, seq=prompt, phase="prefill", **about, **precisions)
    parts = [(1, first)]
    if output > 1:
        middle = prompt + output // 2
        step = rt.estimate(model, batch=batch, kv=middle, phase="decode", **about, **precisions)
        parts.append((output - 1, step))
    low = sum(times * estimate.t_interval[0] for times, estimate in parts)
    high = sum(times * estimate.t_interval[1] for times, estimate in parts)
    expected = sum(times * estimate.t_est for times, estimate in parts)
    return expected, low, high, sum(times * estimate.t_bound for times, estimate in parts)


def main() -> None:
    """Print the page."""
    print(HEAD)
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    errors, inside = [], 0
    rows = list(csv.DictReader((HERE / "published.csv").open(encoding="utf-8")))
    for row in rows:
        expected, low, high, bound = seconds(row)
        tokens = int(row["batch"]) * int(row["output"])
        if row["tokens_per_s"]:
            measured = float(row["tokens_per_s"])
            shown = [f"{measured:,.0f} tok/s", f"{tokens / expected:,.0f}",
                     f"{tokens / high:,.0f}–{tokens / low:,.0f}",
                     f"{tokens / bound:,.0f}"]  # fmt: skip
            real = tokens / measured
        else:
            real = float(row["first_token_ms"]) / 1e3
            shown = [f"{real * 1e3:.0f} ms", f"{expected * 1e3:.1f}",
                     f"{low * 1e3:.1f}–{high * 1e3:.1f}", f"{bound * 1e3:.1f}"]  # fmt: skip
        errors.append(expected / real - 1)
        inside += low <= real <= high
        cells = [row["model"], row["chip"], f"{row['dtype']}, {row['kv_dtype']}", row["batch"],
                 row["input"], row["output"], *shown, f"{errors[-1]:+.0%}",
                 "yes" if low <= real <= high else "no"]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
    size = statistics.fmean(map(abs, errors))
    print(f"\nThe error is of the time: (expected - measured) / measured. Its mean size "
          f"is {size:.0%}, its mean {statistics.fmean(errors):+.0%}; {inside} of {len(rows)} rows "
          "are inside.")  # fmt: skip
    print(FOOT)


if __name__ == "__main__":
    main()
