"""Measured rows of serving engines beside predictions, nothing fitted to them.

    python benchmarks/serving/silicon.py FOLDER [--forms FOLDER] [--model llama] [--out FILE]

FOLDER has serving/silicon_dev.csv.gz (aiconfigurator's silicon sample, Apache-2.0): time per output
token and to the first one, by model, chip, engine, processes and lengths.  Clients send ten
requests each, one after another, of 80 to 100 % of the nominal lengths (InferenceMAX).  Rows that
cannot be priced are counted by their reason.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import rooftrace as rt
from rooftrace.costmodels.timing import link_seconds
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.systems import System, load_system
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.solving.candidates import closed_loop
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
KEYS = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
TIMES = {"TPOT": "tpot", "TTFT": "ttft"}
MEAN = 0.9
SPREAD = 0.2 / 12**0.5 / MEAN
ROUNDS = 10
"""Lengths of 80 to 100 % have this mean and this relative deviation; each client sends so many."""
USED = 0.9
"""Share of a chip's memory that vLLM takes for all (gpu_memory_utilization), of that which is left
beside the model that TensorRT-LLM takes for caches (free_gpu_memory_fraction)."""
MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
MXFP8 = {**MODELOPT, "quant_algo": "W4A8_MXFP4_FP8"}
"""What engines make of an MXFP4 checkpoint on Blackwell: TensorRT-LLM of itself
(ModelConfig.get_mxfp4_quant_algo), vLLM by VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8, which InferenceMAX
sets, and fp8 caches, too."""
HOPPER = ("h100_sxm", "h200_sxm")
LATENTS = ["*.q_a_proj", "*.q_b_proj", "*.kv_a_proj_with_mqa", "*.kv_b_proj"]
"""Products that NVIDIA's NVFP4 checkpoints of DeepSeek-R1 keep in bf16, beside the head."""
ZIPF = {"routing": "skewed:1"}
"""How tokens choose experts: by Zipf's law.  Of 62 dev rows of gpt-oss-120b (all engines and chips,
`tp` 1 to 8) time per token is then 8 % off, and 17 % by equally likely choices.  No kernel is to
blame: engines with other kernels are off alike, and the less, the more chips share weights.
Popular experts stand first in a trace, so that over `ep` one process would have them all: there
choices are equally likely."""
GUESSED = {"1.2.0rc6.post3": "with", "1.1.0rc2.post2": "with and without",
           "0.5.9": "with and without"}  # fmt: skip
"""Versions that InferenceMAX ran for DeepSeek-R1 with multi-token prediction (entries that end in
-mtp of its nvidia-master.yaml, December 2025 to April 2026): TensorRT-LLM's, and of SGLang fp8 on
B200 over `tp=8`.  Rows do not say whether they had it, but those whose "id" begins with dsr1_ have
none of the first version, which had it always: they are taken to be without."""
LAUNCH = {True: 77e-6, False: 51e-6}
"""Seconds of the host, of Hopper's and of later chips, for each kernel of a prompt, which SGLang
and TensorRT-LLM launch one by one from Python; they may be off as these two are.  CUDA graphs hold
decode steps; for prompts SGLang 0.5.9's need a flag, and TensorRT-LLM's a `torch_compile_config`,
which InferenceMAX's scripts set for DeepSeek-R1 on B200 over `ep=8` with prompts of 1,024 alone.
vLLM's end at 512 tokens (max_cudagraph_capture_size), above which compiled code runs.  From first
tokens of Llama-3.1-70B in TensorRT-LLM over `tp=8` with 4 and 8 clients and prompts of 1,024: 62
and 78 ms on B200, 91 ms on H200."""
FRONT = {"vllm": 10e-3}
"""Seconds of a request outside of the steps of vLLM: HTTP, tokens of the prompt, the way to the
engine's process and back.  First tokens of gpt-oss-120b on H200 over `tp` 4 and 8 (13 rows) come
13 ms after what steps take, whatever their number, those of Llama-3.1-70B over `tp=8` 3 ms; of 0,
10, 13 and 15 ms this leaves the least error of 140 rows.  Of TensorRT-LLM it is in `LAUNCH`."""
ENDS = {"low": ("t_low", LAUNCH[False] / LAUNCH[True]), "expected": ("t_est", 1.0),
        "high": ("t_high", LAUNCH[True] / LAUNCH[False])}  # fmt: skip
"""Columns of a step, and shares of the seconds of its launches, of the ends of an interval."""
QUANTISED = 2
"""Kernels beside each product in fp8 with scales of blocks, which a plan has within the product:
its activations are quantised, and scales laid out for DeepGEMM."""
NODE = 8
"""Chips of a host, over which engines cut a model; labels of more count several workers."""


def config_of(row: Any, folder: Path) -> dict[str, Any]:
    """The config of a row's model, with the formats of its checkpoint."""
    name = CONFIGS[row.model_path.split("/")[1]]
    path = names.config_file(name) or folder / "configs" / name / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    own = config.get("quantization_config", {})
    if own.get("quant_method") == "mxfp4":
        if row.system in HOPPER:
            return config
        return {**config, "quantization_config": {**MXFP8, "ignore": own["modules_to_not_convert"]}}
    latents = "q_lora_rank" in config
    kept = ["lm_head", *(LATENTS if latents else ())]
    if row.precision == "fp4":
        formats: dict[str, Any] = {**MODELOPT, "quant_algo": "NVFP4", "ignore": kept}
    elif row.gemm_quant_mode == "fp8_block" or latents:
        formats = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    else:
        formats = {**MODELOPT, "quant_algo": "FP8", "ignore": ["lm_head"]}
    return {**config, "quantization_config": formats}


def written(row: Any, kept: Path, folder: Path) -> Path:
    """The file of a row's config."""
    config = config_of(row, folder)
    wider = "-mxfp8" * (config["quantization_config"].get("quant_algo") == MXFP8["quant_algo"])
    path = kept / f"{CONFIGS[row.model_path.split('/')[1]]}-{row.precision}{wider}.json"
    path.write_text(json.dumps(config))
    return path


def mesh_of(row: Any) -> dict[str, int]:
    """The processes of a row.

    A row whose parts of experts and of each expert are as many has that many processes, as its
    "id" says (tp8_ep8): the columns have their product, and rows with the same measured times have
    the sizes of the "id".  Without a size of attention, batches are of one process (c48: 6 on
    each of 8).  TensorRT-LLM gathers the tokens of replicas on hosts of 8 chips: it sends rows to
    experts with multi-node NVLink or DeepEP alone (AlltoallMethodType).  Raises RequestError for
    more processes than heads are cut over.
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
    split = {"etp": int(dp) * tp // ep} if dp > 1 else {}
    return {name: size for name, size in sizes.items() if size > 1} | split


def guessed(row: Any) -> bool:
    """Whether tokens may be guessed ahead (see `GUESSED`)."""
    known = row.backend == "trtllm" or (
        (row.system, row.precision, row.tp_size, row.moe_ep_size) == ("b200_sxm", "fp8", 8, 1)
    )
    return known and row.backend_version in GUESSED and not row.id.startswith("dsr1_")


def form_of(config: Path, phase: str, mesh: dict[str, int], kept: Path) -> Form:
    """The step of a config over its sizes, kept in a folder."""
    skewed = "experts" in config.read_text(encoding="utf-8") and "ep" not in mesh
    axes = (f"{axis}{size}" for axis, size in mesh.items())
    name = "-".join([config.stem, phase, *axes, *(["zipf"] if skewed else [])])
    path = kept / f"{name}.form.gz"
    if path.exists():
        return Form.load(path)
    how: dict[str, Any] = {"assume": ZIPF} if skewed else {}
    how |= {"batch": 1} if phase == "prefill" else {}
    form = rt.tools.form(str(config), over=SIZES[phase], phase=phase, mesh=mesh or None, **how)
    form.save(path)
    return form


def priced(rows: pd.DataFrame, kept: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Predictions of rows with one checkpoint and one mesh."""
    first = rows.iloc[0]
    mesh = mesh_of(first)
    if guessed(first):
        ran = f"{first.backend} {first.backend_version} {GUESSED[first.backend_version]} it"
        raise RequestError(f"InferenceMAX ran {ran}: multi-token prediction is not in the row")
    for (system, engine), some in rows.groupby(["system", "backend"]):
        config = written(some.iloc[0], kept, folder)
        decode, prefill = (form_of(config, phase, mesh, kept) for phase in SIZES)
        joined: System = load_system(SYSTEMS[system])
        yield from answered(some, engine, joined.joined_chip, decode, prefill, config)


def answered(
    rows: pd.DataFrame, engine: str, chip: Chip, decode: Form, prefill: Form, config: Path
) -> Iterator[dict[str, Any]]:
    """Milliseconds per token and to the first one of rows of one engine on one chip."""
    # dsr1_fp8_b200.sh, dsr1_fp4_b200.sh, dsr1_*_trt.sh of InferenceMAX: dtype of the cache
    later = engine == "trtllm" or rows.system.iloc[0] not in HOPPER
    cache = "fp8" if later and "q_lora_rank" in config.read_text(encoding="utf-8") else None
    how, alone = (
        Conditions.of(rt.tools.execution_model("serving", library=engine, dispatch=dispatch),
                      None, None, cache)
        for dispatch in ("graph", "compiled" if engine == "vllm" else "graph")
    )  # fmt: skip
    clients = rows.batch_size.to_numpy(dtype=np.int64)
    prompt, answer = (np.rint(rows[n] * MEAN).to_numpy(dtype=np.int64) for n in ("isl", "osl"))
    batch = np.minimum(clients, kept_at_once(decode, chip, how, prompt, answer, rows.iloc[0]))
    points = Points({"batch": batch, "kv": prompt + answer // 2})
    steps = evaluated(decode, points, [chip], how)
    prompts, two = (
        evaluated(prefill, Points({"seq": sizes}), [chip], alone) for sizes in (prompt, 2 * prompt)
    )
    launch = launching(prefill, how, rows.iloc[0], config)
    scheduled = [scheduling(row, engine) for row in rows.itertuples()]
    tokens, held = (np.array(column) for column in zip(*scheduled, strict=True))
    loop = {"rounds": ROUNDS, "spread": SPREAD, "together": np.maximum(tokens / prompt, 1),
            "held": held}  # fmt: skip
    found: dict[str, Any] = {"row": rows.index}
    for end, (name, share) in ENDS.items():
        alone, least = prompts[name], launch * share
        more = np.minimum(alone, two[name] - alone)  # their attention is not of two prompts
        own = np.maximum(alone, least)

        def filled(many: Any, alone: Any = alone, more: Any = more, least: Any = least) -> Any:
            return np.maximum(alone + (many - 1) * more, least)

        tpot, wait = closed_loop(steps[name], own, batch, answer, filled=filled, **loop)
        queue = (clients / batch - 1) * (answer * tpot + wait + own) + FRONT.get(engine, 0.0)
        found |= {f"tpot_{end}": tpot * 1e3, f"ttft_{end}": (queue + wait + own) * 1e3}
    for values in zip(*found.values(), strict=True):
        yield dict(zip(found, values, strict=True))


def launching(prefill: Form, how: Conditions, row: Any, config: Path) -> float:
    """Seconds of the host for the kernels of a prompt, where an engine launches them one by one."""
    if row.backend == "vllm":
        return 0.0
    plan = how.plan(prefill.graph(seq=1024))
    blocks = "weight_block_size" in config.read_text(encoding="utf-8")
    products = {op.id for op in plan.graph.ops if op.name in ("aten.mm", "rooftrace.expert_mm")}
    beside = QUANTISED * blocks
    many = sum(group.times * (1 + beside * len(products & {*group.ops})) for group in plan.groups)
    return many * LAUNCH[row.system in HOPPER]


def apart(rows: pd.DataFrame, kept: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Predictions of rows with one checkpoint, and one mesh of prefill and of decode each.

    Prompts wait for one of the workers of prefill (of each of its replicas); then their caches are
    sent, over the datasheet's bandwidth; then they decode with all that are not in prefill.
    """
    if rows.prefill_num_workers.isna().any():
        raise RequestError("the row does not say how many workers prefill and decode")
    sides = {side: rows.drop(columns=["batch_size", *KEYS]).rename(columns=lambda name, side=side:
             name.removeprefix(f"{side}_")) for side in ("prefill", "decode")}  # fmt: skip
    config = written(rows.iloc[0], kept, folder)
    meshes = {side: mesh_of(some.iloc[0]) for side, some in sides.items()}
    forms = {side: form_of(config, side, mesh, kept) for side, mesh in meshes.items()}
    many = {side: (some.num_workers * some.attention_dp_size).to_numpy(dtype=np.int64)
            for side, some in sides.items()}  # fmt: skip
    clients = rows.id.str.extract(r"_c(\d+)_")[0].to_numpy(dtype=np.int64)
    for place, (number, row) in enumerate(rows.iterrows()):
        system = load_system(SYSTEMS[row.system])
        way = (
            [system.joined_chip],
            Conditions.of(rt.tools.execution_model("serving", library=row.backend)),
        )
        prompt, answer = (round(row[column] * MEAN) for column in ("isl", "osl"))
        prefill = evaluated(forms["prefill"], Points({"seq": np.array([prompt])}), *way)
        launch = launching(forms["prefill"], way[1], row, config)
        far = max(system.size_of(0), forms["prefill"].example.processes)
        ranks = (0, far if len(system.levels) > 1 else 1)
        sent = link_seconds(system, "send", float(prefill["kv_memory"][0]), ranks)
        decoding, found = float(clients[place]), {"row": number}
        for _ in range(3):  # those that wait do not decode: a fixed point
            sizes = {"batch": max(1, round(decoding / many["decode"][place])),
                     "kv": prompt + answer // 2}  # fmt: skip
            points = Points({name: np.array([size]) for name, size in sizes.items()})
            step = evaluated(forms["decode"], points, *way)
            for end in ("low", "high", "expected"):
                name, share = ENDS[end]
                own, each = max(float(prefill[name][0]), launch * share), float(step[name][0])
                wait = queued(clients[place], many["prefill"][place], own, each * answer)
                found |= {f"tpot_{end}": each * 1e3, f"ttft_{end}": (wait + sent + each) * 1e3}
            decoding = clients[place] * each * answer / (each * answer + wait)
        yield found


def queued(clients: int, workers: int, prefill: float, answer: float) -> float:
    """Mean seconds from a request to the end of its prefill: clients and workers, simulated."""
    draw = random.Random(0)
    free, ready = [0.0] * workers, [0.0] * clients
    waits = []
    for _ in range(ROUNDS * clients):
        sent, worker = heapq.heappop(ready), heapq.heappop(free)
        done = max(sent, worker) + prefill * draw.uniform(0.8, 1.0) / MEAN
        waits.append(done - sent)
        heapq.heappush(free, done)
        heapq.heappush(ready, done + answer * draw.uniform(0.8, 1.0) / MEAN)
    return sum(waits) / len(waits)


def kept_at_once(
    decode: Form, chip: Chip, how: Conditions, prompt: Any, answer: Any, row: Any
) -> Any:
    """Requests whose caches a chip has room for.

    TensorRT-LLM starts a request where its whole answer has room (GUARANTEED_NO_EVICT, its default
    policy); vLLM and SGLang start it where its prompt has, and take caches back when they run out:
    there, caches are half grown on the average.
    """
    kv = prompt + (answer if row.backend == "trtllm" else answer // 2)
    some, more = (
        evaluated(decode, Points({"batch": np.full_like(kv, count), "kv": kv}), [chip], how)
        ["peak_memory"].astype(float) for count in (8, 16)
    )  # fmt: skip
    each = (more - some) / 8
    model, used = some - 8 * each, used_by(row)
    beside = used * (chip.room() - model)
    room = beside if row.backend == "trtllm" else chip.room(1 - used) - model
    many = np.floor(room / each).astype(np.int64)
    if (many < 1).any():
        least = (model + each).max() / 1e9
        raise RequestError(f"a request takes {least:.0f} GB of a chip: too much for {chip.name}")
    return many


def used_by(row: Any) -> float:
    """The share of memory that the scripts of `scheduling` have an engine take.

    SGLang takes it for weights and caches alone (mem_fraction_static), and more over four chips,
    of which DeepSeek-R1 in fp8 leaves little.
    """
    if row.backend == "vllm" or "Llama" in row.model_path:
        return USED
    if row.backend == "trtllm":
        return 0.85 if "gpt-oss" in row.model_path else 0.8
    return 0.85 if row.precision == "fp4" else 0.82 if row.tp_size > 4 else 0.95


def scheduling(row: Any, engine: str) -> tuple[int, int]:
    """Tokens of one step, and steps for which prompts are held back, as InferenceMAX's scripts set.

    Of its benchmarks/: 70b_fp8_b200_docker.sh and gptoss_fp4_h100_docker.sh (vLLM),
    70b_fp8_h200_trt_slurm.sh, gptoss_fp4_b200_trt_slurm.sh and dsr1_fp8_b200_trt_slurm.sh (room for
    one prompt), dsr1_fp8_b200_docker.sh and dsr1_fp4_b200_docker.sh (SGLang, which looks for
    requests every so many steps: half as many on the average).
    """
    many = row.batch_size >= 16
    if engine == "vllm":
        return 8192, 0
    if engine == "sglang":
        four = row.precision == "fp8" and row.tp_size == 4
        polled = 0 if row.system == "h200_sxm" else 30 if many and not four else 10
        return (8192 if four else 32768 if row.precision == "fp8" else 16384), polled // 2
    if "Llama" in row.model_path:
        return 16384, 20 if row.isl == row.osl == 1024 and row.tp_size < 8 else 0
    if "gpt-oss" in row.model_path:
        return 20000, 0
    # of dsr1_*_trt.sh since 21 January 2026, before versions 1.2 were run
    least = 8192 if str(row.backend_version).startswith("1.2") else 0
    return max(int(row.isl + row.batch_size + 64), least), 0


def shown(table: pd.DataFrame) -> Iterator[str]:
    """Mean error, bias and share inside the interval, of each time."""
    for column in TIMES.values():
        measured = table[f"silicon_{column}_ms"]
        error = table[f"{column}_expected"] / measured - 1
        inside = measured.between(table[f"{column}_low"], table[f"{column}_high"])
        yield from (f"{error.abs().mean():.1%}", f"{error.mean():+.1%}", f"{inside.mean():.0%}")


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--forms", type=Path, help="folder in which traced steps are kept")
    parser.add_argument("--model", default="", help="part of a model's name")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows and their predictions")
    options = parser.parse_args()
    rows = pd.read_csv(options.folder / "serving" / "silicon_dev.csv.gz")
    rows = rows[rows.model_path.str.contains(options.model, case=False)]
    kept = options.forms or Path(tempfile.mkdtemp())
    kept.mkdir(parents=True, exist_ok=True)
    refused: dict[str, int] = {}
    made: list[dict[str, Any]] = []
    together = ["model_path", "precision", *KEYS]
    sides = ["mode", *(f"{side}_{key}" for side in ("prefill", "decode") for key in KEYS)]
    flags = (rows.prefill_num_workers.isna(), rows.apply(guessed, axis=1))
    sides = [*together, *sides, *(flag.rename(place) for place, flag in enumerate(flags))]
    for _, some in rows.groupby(sides, dropna=False):
        way = priced if some["mode"].iloc[0] == "agg" else apart
        try:
            made += way(some, kept, options.folder)
        except (RequestError, rt.types.TraceError, KeyError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            refused[reason] = refused.get(reason, 0) + len(some)
    table = rows.join(pd.DataFrame(made).set_index("row"), how="inner")
    if options.out:
        table.to_csv(options.out)
    by = [table.model_path.str.split("/").str[1], "system", "backend", "precision", "mode"]
    heads = [f"{name} {what}" for name in TIMES for what in ("error", "bias", "inside")]
    print(f"| model | system | engine | precision | mode | rows | {' | '.join(heads)} |")
    print("|---|---|---|---|---|" + "---:|" * (1 + len(heads)))
    for keys, some in [*table.groupby(by), (("all", "", "", "", ""), table)]:
        print(f"| {' | '.join(map(str, keys))} | {len(some)} | {' | '.join(shown(some))} |")
    for reason, count in refused.items():
        print(f"\nNot priced: {reason}, {count} rows")


if __name__ == "__main__":
    main()
