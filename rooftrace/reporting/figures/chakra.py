"""Steps saved as execution traces of MLCommons Chakra: bytes of messages, nodes, process groups."""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rooftrace._escapes import file_part, to_json
from rooftrace._writing import write_bytes
from rooftrace.costmodels.estimates import Estimate, Following, kernels_in_order
from rooftrace.errors import RequestError
from rooftrace.graph import Collective, Group, OpGraph, records
from rooftrace.hardware.systems.records import COLLECTIVES
from rooftrace.reporting.renderers import words
from rooftrace.reporting.sections import Results

# -- schema ----------------------------------------------------------------------------------------
# Messages of MLCommons Chakra's execution traces (et_def.proto) as bytes of protocol buffers.
#
# A file is one GlobalMetadata and then Nodes, each after its length.

VERSION = "1.0.0"
"""Of the schema."""

COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
"""Types of nodes: kernels, and exchanges of two and of more processes."""
_VARINT, _FIXED64, _BYTES = 0, 1, 2
"""Wire types."""
_DOUBLE_VAL, _INT32_VAL, _INT64_VAL, _UINT64_VAL, _BOOL_VAL, _STRING_VAL = 3, 7, 9, 13, 27, 29
_TYPED = {
    "comm_src": _INT32_VAL,
    "comm_dst": _INT32_VAL,
    "comm_tag": _INT32_VAL,
    "tensor_size": _UINT64_VAL,
}
"""Integer attributes that readers expect in another type than int64."""

Attribute = bool | int | float | str


def metadata(attributes: Mapping[str, Attribute]) -> bytes:
    """The first message of a file."""
    return _text(1, VERSION) + b"".join(_nested(2, attribute(*each)) for each in attributes.items())


def node_message(
    number: int,
    name: str,
    kind: int,
    *,
    data: Iterable[int] = (),
    order: Iterable[int] = (),
    start: int = 0,
    duration: int = 0,
    attributes: Mapping[str, Attribute],
) -> bytes:
    """A node; data and order: the nodes that it waits for.  start, duration: microseconds."""
    parts = [
        _integer(1, number),
        _text(2, name),
        _integer(3, kind),
        _packed(4, order),
        _packed(5, data),
        _integer(6, start),
        _integer(7, duration),
        *(node_attribute(*each) for each in attributes.items()),
    ]
    return b"".join(parts)


def node_attribute(name: str, value: Attribute) -> bytes:
    """An attribute as a part of a node."""
    return _nested(10, attribute(name, value))


def attribute(name: str, value: Attribute) -> bytes:
    """A name with a value of the type that readers expect."""
    if isinstance(value, bool):
        content = _tag(_BOOL_VAL, _VARINT) + _varint(value)
    elif isinstance(value, str):
        content = _nested(_STRING_VAL, _encoded(value))
    elif isinstance(value, float):
        content = _tag(_DOUBLE_VAL, _FIXED64) + struct.pack("<d", value)
    else:
        content = _tag(_TYPED.get(name, _INT64_VAL), _VARINT) + _varint(value)
    return _text(1, name) + content


def delimited(message: bytes) -> bytes:
    """A message after its length."""
    return _varint(len(message)) + message


def _integer(field: int, value: int) -> bytes:
    """An integer; 0 is the default of readers and left out."""
    return _tag(field, _VARINT) + _varint(value) if value else b""


def _packed(field: int, values: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, values))
    return _nested(field, content) if content else b""


def _text(field: int, text: str) -> bytes:
    return _nested(field, _encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _nested(field: int, content: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(content)) + content


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(value: int) -> bytes:
    """An integer in groups of 7 bits, the lowest first."""
    if value < 0:
        raise ValueError(f"{value}: expected no number below 0")
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


# -- saving ----------------------------------------------------------------------------------------
# A step as execution traces of MLCommons Chakra, which simulators of networks read.
#
# One file for each process, NAME.RANK.et, and NAME.groups.json with the ranks of each group.  A
# node is a kernel with its seconds on the chip, or an exchange with its bytes; work of the host is
# left out.

_SUFFIX = ".et"
_TWO = {"send": SEND, "recv": RECV}
"""Exchanges of two processes, and the type of their nodes."""


def save_chakra(
    estimate: Estimate, path: str | os.PathLike[str], every_rank: bool = False
) -> list[Path]:
    """Write a step as Chakra execution traces; the paths of the files.

    path: "step.et" makes step.0.et for the process that was traced, and step.groups.json, the
    groups of processes by the names in the trace.  every_rank: a file for each process of the mesh;
    all run the same kernels, each with its groups.  A node has the kernel's duration in rounded
    microseconds, exact over each stream, and in seconds as the attribute "seconds"; FLOPs and bytes
    as num_ops and tensor_size; comm_size is the input of a process to an exchange.

    Raises RequestError for anything but an estimate, for a pipeline, and with every_rank for a step
    that sends to single processes, or a group along no axis of the mesh.
    """
    asked: object = estimate
    if not isinstance(asked, Estimate):
        kind = type(asked).__name__
        raise RequestError(f"save_chakra of a {kind}: expected an estimate; make one: rt.estimate")
    path = Path(path)
    name = path.name.removesuffix(_SUFFIX)
    files = _files(estimate, name, every_rank)
    for file, content in files.items():
        write_bytes(path.parent / file, content)
    return [path.parent / file for file in files]


def write_traces(report: Results, folder: Path, every_rank: bool = False) -> list[str]:
    """chakra_<phase>.<rank>.et of the main execution on the first chip; the names of the files."""
    names: list[str] = []
    for phase in report.phases:
        prefix = f"chakra_{file_part(phase)}"
        written = save_chakra(report.estimate(phase), folder / prefix, every_rank)
        names += [path.name for path in written]
    return names


def write_traces_of_all(report: Results, folder: Path) -> list[str]:
    """The files of every process of the mesh; their names."""
    return write_traces(report, folder, every_rank=True)


def _files(estimate: Estimate, name: str, every_rank: bool) -> dict[str, bytes]:
    """The contents of the files by name."""
    graph, traced = estimate.graph, traced_rank(estimate.graph)
    ranks = range(estimate.processes) if every_rank else (traced,)
    kernels = kernels_in_order(estimate)
    _check_peers(graph, kernels, ranks)
    groups = {rank: groups_of(graph, rank, estimate.processes) for rank in ranks}
    different = dict.fromkeys(
        (n, members) for each in groups.values() for n, members in each.items()
    )
    # Readers take "0" as the group of all processes.
    numbers = {key: str(number) for number, key in enumerate(different, start=1)}
    nodes = list(_nodes(kernels, traced))
    files = {}
    for rank in ranks:
        named = {group: numbers[group, members] for group, members in groups[rank].items()}
        files[f"{name}.{rank}{_SUFFIX}"] = _file(estimate, rank, kernels, nodes, named)
    if numbers:
        table = {number: members for (_, members), number in numbers.items()}
        files[f"{name}.groups.json"] = to_json(table, indent=1) + b"\n"
    return files


def _check_peers(graph: OpGraph, kernels: Sequence[Following], ranks: Sequence[int]) -> None:
    """Raise RequestError where processes run different kernels."""
    kinds = [kernel.collective.kind for kernel in kernels if kernel.collective]
    two = next((kind for kind in kinds if kind in _TWO), "")
    if not two and ("stages" in graph.workload or graph.mesh.get("pp", 1) > 1):
        raise RequestError(
            "Chakra traces of a pipeline: what its stages send to each other is not in the graph; "
            "write a mesh without pp, or trace a step of yours that sends and receives"
        )
    if two and len(ranks) > 1:
        raise RequestError(
            f"every_rank: the step has a {two} to a single process, so others do not do the same: "
            "write the traced rank alone, and trace others by rt.tools.fake_mesh(sizes, rank=...)"
        )


def _file(
    estimate: Estimate,
    rank: int,
    kernels: Sequence[Following],
    nodes: Sequence[bytes],
    groups: Mapping[str, str],
) -> bytes:
    """The trace of one process; groups: their names in the trace."""
    names = {group: node_attribute("pg_name", name) for group, name in groups.items()}
    messages = [metadata(_about(estimate, rank))]
    for kernel, node in zip(kernels, nodes, strict=True):
        messages.append(node + names[kernel.collective.group] if kernel.collective else node)
    return b"".join(map(delimited, messages))


def _about(estimate: Estimate, rank: int) -> dict[str, Attribute]:
    graph = estimate.graph
    return {
        "model": str(graph.model.get("name") or "model"),
        "phase": estimate.phase,
        "chip": estimate.chip.name,
        "execution": estimate.execution.name,
        "mesh": ",".join(f"{axis}={size}" for axis, size in graph.mesh.items()),
        "rank": rank,
    }


def _nodes(kernels: Sequence[Following], rank: int) -> Iterator[bytes]:
    """The nodes of a step, without the names of their groups."""
    streams = dict.fromkeys(("", *(kernel.stream for kernel in kernels)))  # the main one is 0
    numbers = {name: number for number, name in enumerate(streams)}
    ran: dict[str, float] = defaultdict(float)
    for number, kernel in enumerate(kernels):
        before = ran[kernel.stream]
        ran[kernel.stream] += kernel.seconds * 1e6
        row, together = kernel.row, kernel.collective
        facts: dict[str, Attribute] = {
            "is_cpu_op": False,
            "stream": numbers[kernel.stream],
            "num_ops": row.flops + row.flops_recompute,
            "tensor_size": row.bytes,
            "seconds": kernel.seconds,
            "module": row.module,
            "part": row.part,
        }
        name, kind = words.kernel_name(row.name), COMP
        if together is not None and kernel.exchange is not None:
            name = f"{together.kind} over {kernel.exchange.axis}"
            kind = _TWO.get(together.kind, COLLECTIVE)
            facts |= _exchanged(together, kernel.exchange.ranks, rank)
        yield node_message(
            number,
            name,
            kind,
            data=kernel.data,
            order=kernel.order,
            start=round(kernel.start * 1e6),
            duration=round(ran[kernel.stream]) - round(before),
            attributes=facts,
        )


def _exchanged(together: Collective, ranks: int, rank: int) -> dict[str, Attribute]:
    """Facts of an exchange; comm_size is the input of a process."""
    size = together.bytes // ranks if together.kind == "all_gather" else together.bytes
    facts: dict[str, Attribute] = {"comm_size": size}
    number = COLLECTIVES[together.kind].chakra
    if number is not None:
        return {"comm_type": number, **facts}
    peer = -1 if together.peer is None else together.peer
    if peer < 0:
        return facts
    source, target = (rank, peer) if together.kind == "send" else (peer, rank)
    return {**facts, "comm_src": source, "comm_dst": target, "comm_tag": 0}


# -- ranks -----------------------------------------------------------------------------------------
# The groups of every process of a mesh, from those of the process that was traced.


def traced_rank(graph: OpGraph) -> int:
    """The process whose step a graph is: it is in all of its groups."""
    members = [set(group.ranks) for group in graph.groups.values() if group.ranks]
    return min(set.intersection(*members), default=0) if members else 0


def groups_of(graph: OpGraph, rank: int, processes: int) -> dict[str, tuple[int, ...]]:
    """The ranks of each group of a graph, as the process `rank` of all `processes` has it.

    Raises RequestError for a group that lies along no axis of the mesh.
    """
    mesh = graph.mesh or {"": processes}
    return {name: _moved(name, group, mesh, rank) for name, group in graph.groups.items()}


def _moved(name: str, group: Group, mesh: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """A group moved along the axes on which its members do not differ."""
    if rank in group.ranks:
        return group.ranks
    places = [records.mesh_coordinates(member, mesh) for member in group.ranks]
    target = records.mesh_coordinates(rank, mesh)
    varying = {axis for axis in mesh if len({place[axis] for place in places}) > 1}
    moved = [
        _rank({axis: (place if axis in varying else target)[axis] for axis in mesh}, mesh)
        for place in places
    ]
    if rank not in moved:
        raise RequestError(
            f"the group {name!r} of ranks {', '.join(map(str, group.ranks))} lies along no axis of "
            f"the mesh, so that of rank {rank} is not known: write the traced rank alone, and "
            f"trace others by rt.tools.fake_mesh(sizes, rank={rank})"
        )
    return tuple(moved)


def _rank(place: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    rank = 0
    for axis, size in mesh.items():
        rank = rank * size + place[axis]
    return rank
