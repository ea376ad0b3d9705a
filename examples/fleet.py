"""Every causal language model of the installed transformers, priced by many processes at once.

    python examples/fleet.py --out out/fleet               # all, on the processors at hand
    python examples/fleet.py --out out/fleet --limit 10    # the first ten
    python examples/fleet.py --out out/fleet --scheduler tcp://HOST:8786    # on a Dask cluster

Each class is built with the default config of its model type, on meta: no weights, no downloads.
The rows of each land in the folder when it ends; run again, the command goes on where it stopped.
A class that cannot be built or traced is listed with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rooftrace.reporting.commands import FleetResult, Task, run_fleet

# Widths stay as they are: on meta a wide layer takes no longer than a narrow one.
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
SHOWN = 20


def priced(
    model_type: str, phase: str, batch: int, seq: int, chips: Sequence[str], layers: int | None
) -> list[dict[str, Any]]:
    """A row for each chip: one step of the causal language model of a type of config."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    import rooftrace as rt

    try:
        config = CONFIG_MAPPING[model_type]()
        for name in DEPTHS if layers else ():
            if getattr(config, name, 0):
                setattr(config, name, min(layers, getattr(config, name)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).bfloat16()
    except Exception as error:  # many a default config is of no model
        problem = f"{type(error).__name__}: {error}"
        raise rt.types.TargetError(f"no model by the default config: {problem}") from error
    plan = rt.plan(rt.trace(model, phase=phase, batch=batch, seq=seq), "efficient")
    rows = []
    for chip in chips:
        estimate = rt.estimate(plan, chip)
        rows.append(
            {
                "model_type": model_type,
                "class": type(model).__name__,
                "chip": chip,
                "parameters": sum(weight.numel() for weight in model.parameters()),
                "flops": estimate.flops,
                "hbm_bytes": estimate.bytes.total,
                "seconds": estimate.t_est,
                "limited_by": estimate.times.regime,
                "ops_without_rule": plan.coverage.ops - plan.coverage.ops_with_rule,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> FleetResult:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="out/fleet", help="the folder of parquet files")
    parser.add_argument("--limit", type=int, help="only the first so many classes")
    parser.add_argument("--scheduler", help='tcp://HOST:PORT, or "none": one after the other, here')
    parser.add_argument("--workers", type=int, help="processes of this machine")
    parser.add_argument("--chip", action="append", help="h200-sxm, if left out; may stand again")
    parser.add_argument("--phase", default="forward", choices=["forward", "prefill", "training"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128, help="tokens of each sequence")
    parser.add_argument(
        "--layers",
        type=int,
        help="at most so many layers: quick, but a hybrid may lose its attention",
    )
    options = parser.parse_args(arguments)

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    common = {name: getattr(options, name) for name in ("phase", "batch", "seq", "layers")}
    common["chips"] = options.chip or ["h200-sxm"]
    tasks = [
        Task(f"{model_type} ({name})", priced, {"model_type": model_type, **common})
        for model_type, name in list(classes.items())[: options.limit]
    ]
    fleet = run_fleet(
        tasks, options.out, scheduler=options.scheduler, workers=options.workers, progress=told
    )
    show(fleet)
    return fleet


def told(words: str) -> None:
    """Tell of tasks that ended; what each is doing meanwhile says nothing here."""
    if " of " in words or "worker" in words:
        print(words, flush=True)


def show(fleet: FleetResult) -> None:
    """The classes with the most FLOPs, then what failed and why."""
    frame = fleet.frame()
    print(f"\n{fleet}")
    if len(frame):
        frame = frame.sort_values(["flops", "class"], ascending=[False, True])
        print(f"\n{'class':34} {'parameters':>12} {'FLOP':>12} {'HBM':>10} {'expected':>11}  chip")
        for row in frame.head(SHOWN).to_dict("records"):
            print(
                f"{row['class']:34} {row['parameters'] / 1e6:10.1f} M {row['flops'] / 1e9:10.1f} G"
                f" {row['hbm_bytes'] / 1e9:7.2f} GB {row['seconds'] * 1e3:8.3f} ms  {row['chip']}"
            )
        if len(frame) > SHOWN:
            print(f"... and {len(frame) - SHOWN} more rows")
    for failure in fleet.failures:
        print(f"\n{failure.title} failed:\n  {failure.error}")


if __name__ == "__main__":  # each worker imports this file
    main()
