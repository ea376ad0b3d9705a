"""Measured rows of serving engines beside predictions, nothing fitted to them.

    python benchmarks/serving/silicon.py FOLDER [--forms FOLDER] [--model llama]

FOLDER has serving/silicon_dev.csv.gz (aiconfigurator's silicon sample, Apache-2.0): time per output
token of closed-loop clients, by model, chip, engine, processes and lengths.  Clients draw lengths
of 80 to 100 % of the nominal ones (InferenceMAX), so that their ratio is the nominal one; steps are
priced at the nominal lengths.  Rows that cannot be priced are counted by their reason.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import System, load_system
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.solving.candidates import time_per_token
from rooftrace.studies.sweeps import Form, evaluated
from rooftrace.tracer import names

SYSTEMS = {
    "h100_sxm": "dgx-h100", "h200_sxm": "dgx-h200", "b200_sxm": "dgx-b200",
    "b300_sxm": "dgx-b300", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72",
}  # fmt: skip
CONFIGS = {"Llama-3.1-70B": "llama-3.1-70b", "DeepSeek-V3": "deepseek-v3",
           "DeepSeek-R1": "deepseek-v3", "DeepSeek-R1-NVFP4": "deepseek-v3",
           "gpt-oss-120b": "openai--gpt-oss-120b"}  # fmt: skip
"""Configs that come along, by the model; else a folder of FOLDER/configs."""
SIZES = {"decode": {"batch": "1..1024", "kv": "512..20480"}, "prefill": {"seq": "512..16384"}}
MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
LATENTS = ["*.q_a_proj", "*.q_b_proj", "*.kv_a_proj_with_mqa", "*.kv_b_proj"]
"""Products that NVIDIA's NVFP4 checkpoints of DeepSeek-R1 keep in bf16, beside the head."""
NODE = 8
"""Chips of a host, over which engines cut a model; labels of more count several workers."""


def config_of(row: Any, folder: Path) -> dict[str, Any]:
    """The config of a row's model, with the formats of its checkpoint."""
    name = CONFIGS[row.model_path.split("/")[1]]
    path = names.config_file(name) or folder / "configs" / name / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        return config
    latents = "q_lora_rank" in config
    kept = ["lm_head", *(LATENTS if latents else ())]
    if row.precision == "fp4":
        formats: dict[str, Any] = {**MODELOPT, "quant_algo": "NVFP4", "ignore": kept}
    elif row.gemm_quant_mode == "fp8_block" or latents:
        formats = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    else:
        formats = {**MODELOPT, "quant_algo": "FP8", "ignore": ["lm_head"]}
    return {**config, "quantization_config": formats}


def mesh_of(row: Any) -> dict[str, int]:
    """The processes of a row.

    A row whose parts of experts and of each expert are as many has that many processes, as its
    "id" says (tp8_ep8): the columns have their product, and rows with the same measured times have
    the sizes of the "id".  Without a size of attention, batches are of one process (c48: 6 on
    each of 8).  Raises RequestError for more processes than heads are cut over.
    """
    tp, ep, of_experts = (int(row[f"{n}_size"]) for n in ("tp", "moe_ep", "moe_tp"))
    dp = row.attention_dp_size
    if pd.isna(dp):
        tp, dp = 1, tp
    elif ep == of_experts:
        tp, dp = (1 if tp == 1 else ep), (ep if dp > 1 else 1)
    if tp > NODE:
        raise RequestError(f"{NODE} chips or fewer share heads: more are several workers together")
    sizes = {"dp": int(dp), "tp": tp, "ep": ep}
    return {name: size for name, size in sizes.items() if size > 1}


def form_of(config: Path, phase: str, mesh: dict[str, int], kept: Path) -> Form:
    """The step of a config over its sizes, kept in a folder."""
    name = "-".join([config.stem, phase, *(f"{axis}{size}" for axis, size in mesh.items())])
    path = kept / f"{name}.form.gz"
    if path.exists():
        return Form.load(path)
    how: dict[str, Any] = {"batch": 1} if phase == "prefill" else {}
    form = rt.tools.form(str(config), over=SIZES[phase], phase=phase, mesh=mesh or None, **how)
    form.save(path)
    return form


def priced(rows: pd.DataFrame, kept: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Predictions of rows with one checkpoint and one mesh."""
    first = rows.iloc[0]
    mesh, name = mesh_of(first), CONFIGS[first.model_path.split("/")[1]]
    config = kept / f"{name}-{first.precision}.json"
    config.write_text(json.dumps(config_of(first, folder)))
    decode, prefill = (form_of(config, phase, mesh, kept) for phase in SIZES)
    for (system, engine), some in rows.groupby(["system", "backend"]):
        joined: System = load_system(SYSTEMS[system])
        how = Conditions.of(rt.tools.execution_model("serving", library=engine))
        batch, prompt, answer = (
            some[column].to_numpy(dtype=np.int64) for column in ("batch_size", "isl", "osl")
        )
        points = Points({"batch": batch, "kv": prompt + answer // 2})
        steps = evaluated(decode, points, [joined.joined_chip], how)
        prompts = evaluated(prefill, Points({"seq": prompt}), [joined.joined_chip], how)
        more = prompts["t_est"] / answer
        ends = {
            end: time_per_token(steps[name], more * steps[name] / steps["t_est"], batch)
            for end, name in (("low", "t_low"), ("expected", "t_est"), ("high", "t_high"))
        }
        for place, number in enumerate(some.index):
            yield {"row": number, **{end: column[place] * 1e3 for end, column in ends.items()}}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--forms", type=Path, help="folder in which traced steps are kept")
    parser.add_argument("--model", default="", help="part of a model's name")
    options = parser.parse_args()
    rows = pd.read_csv(options.folder / "serving" / "silicon_dev.csv.gz")
    rows = rows[rows.model_path.str.contains(options.model, case=False)]
    kept = options.forms or Path(tempfile.mkdtemp())
    kept.mkdir(parents=True, exist_ok=True)
    refused: dict[str, int] = {}
    made: list[dict[str, Any]] = []
    together = ["model_path", "precision", "tp_size", "attention_dp_size", "moe_tp_size",
                "moe_ep_size"]  # fmt: skip
    apart = int((rows["mode"] != "agg").sum())
    for _, some in rows[rows["mode"] == "agg"].groupby(together, dropna=False):
        try:
            made += priced(some, kept, options.folder)
        except (RequestError, KeyError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            refused[reason] = refused.get(reason, 0) + len(some)
    table = rows.join(pd.DataFrame(made).set_index("row"), how="inner")
    table["error"] = table.expected / table.silicon_tpot_ms - 1
    table["inside"] = table.silicon_tpot_ms.between(table.low, table.high)
    by = [table.model_path.str.split("/").str[1], "system", "backend", "precision"]
    print("| model | system | engine | precision | rows | mean error | bias | inside |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for keys, some in [*table.groupby(by), (("all", "", "", ""), table)]:
        error = some.error
        print(f"| {' | '.join(map(str, keys))} | {len(some)} | {error.abs().mean():.1%} | "
              f"{error.mean():+.1%} | {some.inside.mean():.0%} |")  # fmt: skip
    print(f"\nNot priced: prefill and decode apart, {apart} rows" if apart else "")
    for reason, count in refused.items():
        print(f"Not priced: {reason}, {count} rows")


if __name__ == "__main__":
    main()
