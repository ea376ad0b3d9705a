"""Reads published measurements of collectives into tables: one row for each point, in SI units."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

LINKS = {
    "a100_sxm": 300e9,
    "h100_sxm": 450e9,
    "h200_sxm": 450e9,
    "b200_sxm": 900e9,
    "b300_sxm": 900e9,
    "gb200": 900e9,
    "gb300": 900e9,
    "l40s": 32e9,
}
"""byte/s of one chip and direction, by the datasheets."""
NIC = {"a100_sxm": 12.5e9, "h100_sxm": 50e9, "b200_sxm": 50e9, "gb200": 50e9}
"""byte/s of one network card."""
SAME_BYTES = ["source", "library", "system", "op", "ranks", "inside", "bytes"]
KERNELS = {
    "vLLM_custom_graph": "vllm",
    "SGLang_CustomAllReduce_graph": "sglang",
    "TRTLLM": "trtllm",
}


def collectives(folder: Path) -> pd.DataFrame:
    """Collectives of NCCL; `inside`: ranks on each node.  Versions are joined by their median."""
    rows = pd.read_csv(folder / "collectives.csv.gz")
    rows = rows[rows.system.isin(LINKS) & (rows.library == "nccl")].copy()
    rows["source"] = rows.source.str.extract(r"(aiconfigurator|vidur)")[0]
    rows["op"] = rows.op.replace({"alltoall": "all_to_all", "send_recv": "send"})
    inside = rows.topology.str.extract(r"(\d+) per")[0].astype(float)
    rows["inside"] = inside.fillna(rows.ranks).astype(int)
    return rows.groupby(SAME_BYTES, as_index=False).seconds.median()


def custom(folder: Path) -> pd.DataFrame:
    """All-reduces of serving libraries, captured in graphs; versions joined by their median."""
    rows = pd.read_csv(folder / "custom_allreduce.csv.gz")
    rows = rows[rows.x_system.isin(LINKS) & rows.kernel_source.isin(KERNELS)].copy()
    rows["library"] = rows.kernel_source.map(KERNELS)
    rows["bytes"] = rows.message_size * 2  # elements of bf16
    rows["seconds"] = rows.latency / 1e3
    rows = rows.rename(columns={"x_system": "system", "num_gpus": "ranks"})
    rows["op"], rows["source"], rows["inside"] = "all_reduce", "aiconfigurator", rows["ranks"]
    return rows.groupby(SAME_BYTES, as_index=False).seconds.median()


def exchanges(folder: Path) -> pd.DataFrame:
    """Dispatches and combines of DeepEP: of its numbers of SMs the best, of versions the median."""
    tables = []
    for mode, file, column in (
        ("normal", "deepep_normal.csv.gz", "{}_transmit_us"),
        ("low-latency", "deepep_ll.csv.gz", "{}_avg_t_us"),
    ):
        rows = pd.read_csv(folder / file).rename(columns={"x_system": "system"})
        rows = rows[rows.system.isin(LINKS)]
        for way, width in (("dispatch", 1), ("combine", 2)):  # fp8 there, bf16 back
            rows = rows.assign(seconds=rows[column.format(way)] / 1e6)
            keys = ["system", "node_num", "hidden_size", "num_token", "num_topk", "num_experts"]
            how = "min" if mode == "normal" else "median"
            table = rows[rows.seconds > 0].groupby(keys, as_index=False).seconds.agg(how)
            table["hidden_bytes"] = table.hidden_size * width
            tables.append(table.assign(mode=mode, way=way))
    table = pd.concat(tables, ignore_index=True)
    table["inside"] = table.system.map({"gb200": 4, "gb300": 4}).fillna(8).astype(int)
    return table
