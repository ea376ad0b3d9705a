"""Graphs on disk: one JSON file (gzip by suffix) that holds one graph per phase.  Needs no torch.

The file is reproducible: keys are sorted where order carries nothing, no dates, gzip without a time
stamp.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftrace._writing import write_bytes
from rooftrace.tracer.arguments import Argument, Neighbour, Ref, refs
from rooftrace.tracer.graph import Assumption, GraphError, Op, OpGraph, Repeat, Tensor

SCHEMA = "rooftrace.graph/3"
_GZIP = b"\x1f\x8b"


class GraphFileError(GraphError):
    """A file that is no saved graph: names the file and what is wrong."""


def save_graphs(graphs: Mapping[str, OpGraph], path: str | os.PathLike[str]) -> Path:
    """Write `graphs` by phase to `path` (gzip if it ends in .gz); nothing is left half-written."""
    path = Path(path)
    write_bytes(path, graphs_bytes(graphs, compress=path.suffix == ".gz"))
    return path


def graphs_bytes(graphs: Mapping[str, OpGraph], compress: bool) -> bytes:
    """The contents of a graph file."""
    data = {"schema": SCHEMA, "graphs": {phase: _encode(graph) for phase, graph in graphs.items()}}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    content = text.encode("utf-8", "backslashreplace")  # a lone surrogate, as JSON escapes it
    return gzip.compress(content, compresslevel=6, mtime=0) if compress else content


def load_graphs(path: str | os.PathLike[str]) -> dict[str, OpGraph]:
    """The graphs of a file by phase, each verified.

    Raises FileNotFoundError, or GraphFileError for a file that is truncated, of another kind or
    version.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == _GZIP else raw
        data = json.loads(text)
    except (OSError, EOFError, zlib.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GraphFileError(f"{path}: not a readable saved graph ({error})") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise GraphFileError(
            f"{path}: schema is {schema!r}, expected {SCHEMA!r}; "
            "make it with `rooftrace trace TARGET -o FILE`"
        )
    try:
        return {phase: _decode(entry).verify() for phase, entry in data["graphs"].items()}
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise GraphFileError(f"{path}: a damaged graph ({type(error).__name__}: {error})") from None


def looks_saved(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an existing file that claims to hold saved graphs (by its first bytes)."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(200)
    if head[:2] == _GZIP:
        try:
            with gzip.open(path, "rb") as file:
                head = file.read(200)
        except (OSError, EOFError, zlib.error):
            return False
    return SCHEMA.encode() in head


# -- encoding ------------------------------------------------------------------------------------


def _encode(graph: OpGraph) -> dict[str, Any]:
    words = _Words()
    values = [
        [
            list(t.shape),
            words(t.dtype),
            list(t.stride),
            words(t.role),
            t.storage,
            t.name,
            list(t.repeats),
            _encode_neighbour(t.then),
        ]
        for t in graph.values
    ]
    ops = [
        [
            words(op.target),
            {k: _encode_argument(v) for k, v in op.arguments.items()},
            list(op.outputs),
            words(op.module),
            op.call,
            words(op.part),
            words(op.kind),
            words(op.family),
            words(op.function),
            words(op.source),
            op.flops_torch,
            dict(op.facts),
            list(op.assumptions),
            list(op.repeats),
            dict(op.steps),
            [_encode_argument(ref) for ref in op.holds],
        ]
        for op in graph.ops
    ]
    return {
        "phase": graph.phase,
        "model": dict(graph.model),
        "workload": dict(graph.workload),
        "provenance": dict(graph.provenance),
        "modules": dict(graph.modules),
        "constants": dict(graph.constants),
        "schemas": {target: list(names) for target, names in sorted(graph.schemas.items())},
        "assumptions": [[a.id, a.kind, a.where, a.text, a.value, a.op] for a in graph.assumptions],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "repeats": [_encode_repeat(repeat) for repeat in graph.repeats],
        "words": words.list,
        "values": values,
        "ops": ops,
    }


def _decode(data: Mapping[str, Any]) -> OpGraph:
    words: list[str] = data["words"]
    values = tuple(
        Tensor(
            shape=tuple(shape),
            dtype=words[dtype],
            stride=tuple(stride),
            role=words[role],
            storage=storage,
            name=name,
            repeats=tuple(repeats),
            then=_decode_neighbour(then),
        )
        for shape, dtype, stride, role, storage, name, repeats, then in data["values"]
    )
    return OpGraph(
        phase=data["phase"],
        values=values,
        ops=tuple(_decode_op(i, words, *entry) for i, entry in enumerate(data["ops"])),
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        modules=data["modules"],
        assumptions=tuple(Assumption(*a) for a in data["assumptions"]),
        repeats=tuple(_decode_repeat(*repeat) for repeat in data["repeats"]),
        constants=data.get("constants", {}),
        schemas={target: tuple(names) for target, names in data.get("schemas", {}).items()},
        model=data["model"],
        workload=data["workload"],
        provenance=data["provenance"],
    )


def _decode_op(
    number: int,
    words: Sequence[str],
    target: int,
    arguments: Mapping[str, Any],
    outputs: list[int],
    module: int,
    call: int,
    part: int,
    kind: int,
    family: int,
    function: int,
    source: int,
    flops_torch: int | None,
    facts: Mapping[str, Any],
    assumptions: list[int],
    repeats: list[int],
    steps: Mapping[str, int],
    holds: list[Any],
) -> Op:
    decoded = {name: _decode_argument(item) for name, item in arguments.items()}
    return Op(
        id=number,
        target=words[target],
        arguments=decoded,
        inputs=tuple(refs(decoded)),
        outputs=tuple(outputs),
        module=words[module],
        call=call,
        part=words[part],
        kind=words[kind],
        family=words[family],
        function=words[function],
        source=words[source],
        flops_torch=flops_torch,
        facts=facts,
        assumptions=tuple(assumptions),
        repeats=tuple(repeats),
        steps=steps,
        holds=tuple(_decode_argument(ref) for ref in holds),
    )


def _encode_repeat(repeat: Repeat) -> list[Any]:
    return [
        repeat.id,
        repeat.count,
        repeat.container,
        repeat.first,
        repeat.step,
        repeat.source,
        [[value, list(names)] for value, names in repeat.names.items()],
        [[number, list(others)] for number, others in repeat.assumptions.items()],
    ]


def _decode_repeat(
    number: int,
    count: int,
    container: str,
    first: int,
    step: int,
    source: str,
    names: list[Any],
    assumptions: list[Any],
) -> Repeat:
    return Repeat(
        id=number,
        count=count,
        container=container,
        first=first,
        step=step,
        source=source,
        names={value: tuple(copies) for value, copies in names},
        assumptions={number: tuple(others) for number, others in assumptions},
    )


def _encode_neighbour(then: Neighbour | None) -> list[int] | None:
    return None if then is None else [then.repeat, then.value, then.shift]


def _decode_neighbour(item: list[int] | None) -> Neighbour | None:
    return None if item is None else Neighbour(*item)


def _encode_argument(item: Argument) -> Any:
    if type(item) is Ref:
        encoded: dict[str, Any] = {"ref": item.id}
        if item.then is not None:
            encoded["then"] = _encode_neighbour(item.then)
        if item.every:
            encoded["every"] = True
        return encoded
    if isinstance(item, tuple):
        return [_encode_argument(x) for x in item]
    return item


def _decode_argument(item: Any) -> Argument:
    if isinstance(item, dict):
        return Ref(item["ref"], _decode_neighbour(item.get("then")), item.get("every", False))
    if isinstance(item, list):
        return tuple(_decode_argument(x) for x in item)
    return item


class _Words:
    """Strings that repeat are stored once."""

    def __init__(self) -> None:
        self.list: list[str] = []
        self._index: dict[str, int] = {}

    def __call__(self, word: str) -> int:
        index = self._index.get(word)
        if index is None:
            index = self._index[word] = len(self.list)
            self.list.append(word)
        return index
