"""Execution traces of Chakra, read back by a decoder that is written from their schema."""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.graph import Collective, Group, OpGraph
from tests.conftest import mostly_heavy
from tests.reporting.test_sharded_timeline import estimated
from tests.tracer.sharded_models import WAYS

# -- a decoder -------------------------------------------------------------------------------------

Field = tuple[int, int | bytes]


def varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message: their number, and a whole number or bytes."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag & 7 == 0:
            value, at = varint(data, at)
            yield tag >> 3, value
        else:
            length, at = (8, at) if tag & 7 == 1 else varint(data, at)
            assert tag & 7 in (1, 2)
            yield tag >> 3, data[at : at + length]
            at += length


def packed(data: bytes) -> list[int]:
    at, numbers = 0, []
    while at < len(data):
        number, at = varint(data, at)
        numbers.append(number)
    return numbers


VALUES = {3: "double", 7: "int32", 9: "int64", 13: "uint64", 27: "bool", 29: "string"}
"""The members of AttributeProto's value that we use, by their number in et_def.proto."""
TYPES = {
    "is_cpu_op": "bool",
    "num_ops": "int64",
    "tensor_size": "uint64",
    "comm_type": "int64",
    "comm_size": "int64",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "pg_name": "string",
}
"""The member that the feeder of Chakra reads of each attribute."""


def attribute(data: bytes) -> tuple[str, Any]:
    (first, name), (member, value) = fields(data)
    assert first == 1 and isinstance(name, bytes)
    kind, text = VALUES[member], name.decode()
    assert TYPES.get(text, kind) == kind
    if isinstance(value, bytes):
        return text, struct.unpack("<d", value)[0] if kind == "double" else value.decode()
    return text, bool(value) if kind == "bool" else value


def messages(path: Path) -> list[bytes]:
    data, at, made = path.read_bytes(), 0, []
    while at < len(data):
        length, at = varint(data, at)
        made.append(data[at : at + length])
        at += length
    assert at == len(data)
    return made


NODE = {1: "id", 2: "name", 3: "type", 4: "order", 5: "data", 6: "start", 7: "duration"}


def node(data: bytes) -> dict[str, Any]:
    made: dict[str, Any] = {"id": 0, "order": [], "data": [], "start": 0, "duration": 0}
    for number, value in fields(data):
        if number == 10:
            name, content = attribute(value)
            assert name not in made
            made[name] = content
        elif isinstance(value, bytes):
            made[NODE[number]] = value.decode() if number == 2 else packed(value)
        else:
            made[NODE[number]] = value
    return made


def decoded(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *rest = messages(path)
    version, *about = fields(first)
    assert version == (1, b"1.0.0")
    return dict(attribute(value) for _, value in about), [node(message) for message in rest]


# -- tests -----------------------------------------------------------------------------------------

KINDS = {
    0: "all_reduce",
    2: "all_gather",
    5: "broadcast",
    6: "all_to_all",
    7: "reduce_scatter",
}
"""CollectiveCommType of et_def.proto."""
COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7


RUN_ALWAYS = [way for way in WAYS if way in ("fsdp-again", "hsdp", "sp", "fsdp-sp", "ddp")]


@pytest.mark.parametrize("way", mostly_heavy(WAYS, RUN_ALWAYS))
def test_nodes_are_the_kernels_and_exchanges_of_the_step(way: str, tmp_path: Path) -> None:
    step = estimated(way)
    path, groups = rt.tools.save_chakra(step, tmp_path / "step.et")
    assert (path.name, groups.name) == ("step.0.et", "step.groups.json")
    about, nodes = decoded(path)
    assert (about["phase"], about["rank"], about["chip"]) == ("training", 0, step.chip.name)
    assert [each["id"] for each in nodes] == list(range(step.kernels))
    for each in nodes:
        assert not each["is_cpu_op"]
        assert all(before < each["id"] for before in (*each["data"], *each["order"]))
    assert sum(each["num_ops"] for each in nodes) == step.flops + step.flops_recompute
    assert sum(each["tensor_size"] for each in nodes) == step.bytes_hbm

    seconds = sum(row.timing.t_device for row in step.rows)
    assert sum(each["seconds"] for each in nodes) == pytest.approx(seconds)
    by_stream: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for each in nodes:
        assert abs(each["duration"] - 1e6 * each["seconds"]) < 1.01
        by_stream[each["stream"]].append(each)
    for members in by_stream.values():
        total = sum(1e6 * each["seconds"] for each in members)
        assert sum(each["duration"] for each in members) == pytest.approx(total, abs=0.51)

    ranks = {name: tuple(each) for name, each in json.loads(groups.read_text()).items()}
    exchanged = Counter(
        (KINDS[each["comm_type"]], ranks[each["pg_name"]], bytes_of(each, ranks))
        for each in nodes
        if each["type"] == COLLECTIVE
    )
    flat = step.graph.expand()
    assert exchanged == Counter(
        (op.collective.kind, flat.groups[op.collective.group].ranks, op.collective.bytes)
        for op in flat.ops
        if op.collective
    )


def bytes_of(each: dict[str, Any], ranks: dict[str, tuple[int, ...]]) -> int:
    """Bytes of the whole buffer: of an all_gather, what all processes put in."""
    gathers = KINDS[each["comm_type"]] == "all_gather"
    return int(each["comm_size"]) * (len(ranks[each["pg_name"]]) if gathers else 1)


@pytest.mark.parametrize("way", mostly_heavy(WAYS, RUN_ALWAYS))
def test_nodes_wait_as_the_streams_of_the_step_do(way: str, tmp_path: Path) -> None:
    step = estimated(way)
    _, nodes = decoded(rt.tools.save_chakra(step, tmp_path / "step")[0])
    # Run as soon as all it waits for is done, the step takes no longer than with a host.
    ends: list[float] = []
    for each in nodes:
        start = max((ends[before] for before in (*each["data"], *each["order"])), default=0.0)
        assert start <= each["start"] * 1e-6 + 0.51e-6
        ends.append(start + each["seconds"])
    assert max(ends) <= step.t_est * (1 + 1e-9)
    # Each stream runs in order: every node but the first waits for the one before it, where that
    # one does not run beside.
    if way.startswith("fsdp") and "tp" not in WAYS[way][0]:
        streams = defaultdict(list)
        for each in nodes:
            streams[each["stream"]].append(each)
        for members in streams.values():
            for before, after in itertools.pairwise(members):
                assert before["id"] in (*after["data"], *after["order"])


def test_gathered_weights_are_waited_for_and_not_by_what_comes_before(tmp_path: Path) -> None:
    _, nodes = decoded(rt.tools.save_chakra(estimated("fsdp"), tmp_path / "step")[0])
    behind: list[set[int]] = []
    for each in nodes:
        near = {*each["data"], *each["order"]}
        behind.append(near.union(*(behind[before] for before in near)))
    gathers = [each["id"] for each in nodes if each.get("comm_type") == 2]
    products = [
        each["id"] for each in nodes if each["type"] == COMP and each["module"].endswith("head")
    ]
    assert all(gathers[0] in behind[product] for product in products)
    # The next weights are gathered while the first layer computes.
    assert any(
        each["type"] == COMP and each["id"] < gather and each["id"] not in behind[gather]
        for gather in gathers
        for each in nodes
        if each["stream"] == 0
    )


def test_every_rank_has_its_own_groups(tmp_path: Path) -> None:
    *files, groups = rt.tools.save_chakra(
        estimated("fsdp-sp"), tmp_path / "step.et", every_rank=True
    )
    assert [path.name for path in files] == [f"step.{rank}.et" for rank in range(2 * 4)]
    ranks = json.loads(groups.read_text())
    # Two groups along tp, and four along dp; "0" would be all processes.
    tp, dp = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sorted(ranks.values()) == sorted(tp + dp)
    assert "0" not in ranks
    _, first = decoded(files[0])
    for rank, path in enumerate(files):
        about, nodes = decoded(path)
        assert about["rank"] == rank
        for each, twin in zip(nodes, first, strict=True):
            if "pg_name" in each:
                assert rank in ranks[each["pg_name"]]
                assert len(ranks[each["pg_name"]]) == len(ranks[twin["pg_name"]])
            assert {**each, "pg_name": ""} == {**twin, "pg_name": ""}


@pytest.mark.parametrize(("form", "count"), [("chakra", 1), ("chakra-all", 4)])
def test_a_report_has_the_traces_of_each_phase(form: str, count: int, tmp_path: Path) -> None:
    graph = estimated("tp").graph
    paths = rt.report(graph, chip="h200-sxm").write(tmp_path / "report", [form])
    names = [f"chakra_training.{rank}.et" for rank in range(count)]
    assert [path.name for path in paths] == [*names, "chakra_training.groups.json"]
    there = {path.name for path in (tmp_path / "report").iterdir()}
    assert there == {path.name for path in paths} | {"_report.json"}


def alone() -> Any:
    return rt.estimate(rt.trace(torch.nn.Linear(64, 64), torch.empty(8, 64, device="meta")))


def test_a_step_of_one_process_is_a_file_of_kernels(tmp_path: Path) -> None:
    (path,) = rt.tools.save_chakra(alone(), tmp_path / "linear.et", every_rank=True)
    _, nodes = decoded(path)
    assert [each["type"] for each in nodes] == [COMP]
    assert nodes[0]["num_ops"] == 2 * 8 * 64 * 64 + 8 * 64  # the product, and the bias


def sending(graph: OpGraph) -> OpGraph:
    """The graph with its first exchange sent to rank 3."""
    place = next(number for number, op in enumerate(graph.ops) if op.collective)
    op = graph.ops[place]
    sent = Collective("send", op.collective.group, op.collective.bytes, "fp32", peer=3)
    ops = list(graph.ops)
    ops[place] = msgspec.structs.replace(op, collective=sent)
    return graph.with_ops(ops)


def test_what_is_sent_to_one_process_names_it(tmp_path: Path) -> None:
    step = rt.estimate(sending(estimated("tp").graph))
    _, nodes = decoded(rt.tools.save_chakra(step, tmp_path / "step")[0])
    (each,) = (each for each in nodes if each["type"] == SEND)
    assert (each["comm_src"], each["comm_dst"]) == (0, 3)
    with pytest.raises(RequestError, match=r"a send to a single process"):
        rt.tools.save_chakra(step, tmp_path / "all", every_rank=True)
    assert not list(tmp_path.glob("all*"))


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    step = estimated("tp")
    with pytest.raises(RequestError, match=r"save_chakra of a OpGraph: expected an estimate"):
        rt.tools.save_chakra(step.graph, tmp_path / "step.et")
    staged = step.graph.replace(mesh={"pp": 2, "tp": 4})
    with pytest.raises(RequestError, match=r"write a mesh without pp"):
        rt.tools.save_chakra(rt.estimate(staged), tmp_path / "step.et")
    odd = step.graph.replace(groups={"0": Group((0, 1, 2))}, mesh={"tp": 4})
    with pytest.raises(RequestError, match=r"lies along no axis of the mesh"):
        rt.tools.save_chakra(rt.estimate(odd), tmp_path / "step.et", every_rank=True)
    assert not list(tmp_path.iterdir())
