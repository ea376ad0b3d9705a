"""Measured rows of serving engines beside aiconfigurator's estimates and those of silicon.py.

    pip install aiconfigurator==0.12.0
    python benchmarks/serving/peers.py ROWS.csv [--sample N]

ROWS.csv is what `silicon.py --out` wrote, or the measured rows themselves.  aiconfigurator
interpolates kernels measured on the same systems.
"""

from __future__ import annotations

import argparse
import collections
import logging
from collections.abc import Iterator
from typing import Any

import pandas as pd

KEYS = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
SIDES = tuple(f"{side}_{key}" for side in ("prefill", "decode")
              for key in (*KEYS, "batch_size", "num_workers"))  # fmt: skip
MODES = ("gemm_quant_mode", "moe_quant_mode")
TIMES = {"TPOT": "tpot", "TTFT": "ttft"}


def estimated(row: Any) -> dict[str, float]:
    """Milliseconds per token and to the first one, by aiconfigurator.

    A mixture of experts is also cut by them; other models have one cut, which the columns repeat.
    """
    from aiconfigurator.cli.api import cli_estimate

    apart = row["mode"] == "disagg"
    names = (*MODES, *(SIDES if apart else (*KEYS, "batch_size")))
    given = {name: row[name] for name in names if not pd.isna(row[name])}
    given = {k: v if isinstance(v, str) else int(v) for k, v in given.items()}
    if "Llama" in row.model_path:
        given = {name: value for name, value in given.items() if "moe" not in name}
        given["kvcache_quant_mode"] = "fp8"
    found = cli_estimate(
        row.model_path.replace("meta-llama/Llama-3.1", "meta-llama/Meta-Llama-3.1"), row.system,
        mode=row["mode"], backend_name=row.backend, isl=int(row.isl), osl=int(row.osl), **given,
    )  # fmt: skip
    return {"tpot": found.tpot, "ttft": found.ttft}


def shown(table: pd.DataFrame, suffix: str) -> Iterator[str]:
    """Rows answered, and mean error, median error and bias of each time, of one predictor."""
    yield f"{table[f'tpot{suffix}'].notna().mean():.0%}"
    for name in TIMES.values():
        error = (table[name + suffix] / table[f"silicon_{name}_ms"] - 1).dropna()
        yield f"{error.abs().mean():.1%}, {error.abs().median():.1%}, {error.mean():+.1%}"


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--sample", type=int, help="so many rows, drawn by a fixed seed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    table = pd.read_csv(options.rows, index_col=0)
    if options.sample:
        table = table.sample(options.sample, random_state=0)
    refused: collections.Counter[str] = collections.Counter()
    found = {}
    for number, row in table.iterrows():
        try:
            found[number] = estimated(row)
        except Exception as error:  # whatever another program raises
            refused[f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"] += 1
    theirs = pd.DataFrame.from_dict(found, orient="index", columns=[*TIMES.values()])
    table = table.join(theirs.add_suffix("_theirs"))
    suffixes = {"rooftrace": "_expected", "aiconfigurator": "_theirs"}
    heads = ("answered", *(f"{name}: mean, median, bias" for name in TIMES))
    print(f"| model | engine | mode | rows | by | {' | '.join(heads)} |")
    print("|---|---|---|---:|---|" + "---:|" * len(heads))
    by = [table.model_path.str.split("/").str[1], "backend", "mode"]
    for keys, some in [*table.groupby(by), (("all", "", ""), table)]:
        for name, suffix in suffixes.items():
            if f"tpot{suffix}" in table:
                cells = " | ".join(shown(some, suffix))
                print(f"| {' | '.join(keys)} | {len(some)} | {name} | {cells} |")
    for reason, count in refused.items():
        print(f"\naiconfigurator answers {count} rows with {reason}")


if __name__ == "__main__":
    main()
