"""Graph files: JSON encoding and decoding, and bounds on the sizes and counts in a file.

A file (gzip by suffix) holds one graph per phase, and is reproducible: keys are sorted where order
carries nothing, no dates, gzip without a time stamp.  It is strict JSON: an infinity or a NaN in
arguments and facts stands as {"number": "-inf"}; older files have it bare, and are read too.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

from rooftrace._processes import collector_off
from rooftrace._progress import tell
from rooftrace._reading import FileKind, beginning, json_of, record_of, text_of
from rooftrace._writing import write_packed
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import (
    Argument,
    Assumption,
    Collective,
    GraphError,
    Group,
    Neighbour,
    Op,
    Ref,
    Repeat,
    Tensor,
    one_nan,
    refs,
)
from rooftrace.hardware.precisions import precision

# -- bounds ----------------------------------------------------------------------------------------
# Where pricing cannot be closed over the iterations, these bounds keep it short.

MOST_ELEMENTS = (1 << 63) - 1
"""Most elements of all copies of a value, and most runs of an op: torch counts no further."""
MOST_LISTED = 1_000_000
"""Copies that an op takes or makes as one list: such an op is priced copy by copy."""
MOST_VISITS = 5_000_000
"""Ops as memory is followed over a step, where seven iterations of a repeat stand for all."""
_VISITED = 7


def bounded(graph: OpGraph) -> OpGraph:
    """The graph.  Raises GraphError for the first repeat, value or op that passes a bound."""
    for repeat in graph.repeats:
        _check_repeat(graph, repeat)
    for number, tensor in enumerate(graph.values):
        precision(tensor.dtype)
        precision(tensor.stored or tensor.dtype)
        _check_inside(f"value {number}", tensor.repeats)
        if min(tensor.shape, default=0) < 0:
            raise GraphError(f"value {number}: a negative size in shape {list(tensor.shape)}")
        size = math.prod(map(float, tensor.shape)) * _runs(graph, tensor.repeats)
        if size > MOST_ELEMENTS:
            raise GraphError(
                f"value {number}: shape {list(tensor.shape)} in all iterations has {size:.3g} "
                f"elements; expected {MOST_ELEMENTS:.3g} at most"
            )
    visits = 0
    for op in graph.ops:
        _check_op(graph, op)
        visits += math.prod(min(graph.repeats[r].count, _VISITED) for r in op.repeats)
    if visits > MOST_VISITS:
        raise GraphError(
            f"repeats nest so deep that memory is followed over {visits:,} ops; expected "
            f"{MOST_VISITS:,} at most"
        )
    return graph


def _runs(graph: OpGraph, repeats: tuple[int, ...]) -> float:
    return math.prod(float(graph.repeats[r].count) for r in repeats)


def _check_inside(name: str, repeats: tuple[int, ...]) -> None:
    if len(set(repeats)) < len(repeats):
        raise GraphError(f"{name} is in one repeat twice: {list(repeats)}")


def _check_repeat(graph: OpGraph, repeat: Repeat) -> None:
    name = f"repeat {repeat.id}"
    lists = (*repeat.names.values(), *repeat.assumptions.values())
    if any(len(listed) != repeat.count for listed in lists):
        raise GraphError(f"{name}: {repeat.count:,} iterations, but its lists have fewer or more")
    if repeat.container is not None and repeat.count > len(graph.modules) + len(graph.values):
        raise GraphError(
            f"{name}: {repeat.count:,} iterations of the modules in {repeat.container!r:.60}, but "
            f"the graph has {len(graph.modules):,} modules"
        )
    if not set(repeat.names) <= set(range(len(graph.values))):
        raise GraphError(f"{name} names values that are not there")
    rests = {number for key, listed in repeat.assumptions.items() for number in (key, *listed)}
    if not rests <= set(range(len(graph.assumptions))):
        raise GraphError(f"{name} rests on assumptions that are not there")


def _check_op(graph: OpGraph, op: Op) -> None:
    name = f"op {op.id} ({op.target:.60})"
    _check_inside(name, op.repeats)
    if _runs(graph, op.repeats) > MOST_ELEMENTS:
        raise GraphError(f"{name} runs more than {MOST_ELEMENTS:.3g} times")
    if not set(op.assumptions) <= set(range(len(graph.assumptions))):
        raise GraphError(f"{name} rests on assumptions that are not there: {op.assumptions}")
    if op.steps and not op.repeats:
        raise GraphError(f"{name} has steps outside of every repeat")
    for argument in op.steps:
        if type(op.arguments.get(argument)) is not int:
            raise GraphError(f"{name}: {argument!r:.60} has a step, and is no whole number")
    listed = (*(ref.id for ref in op.reads if ref.every), *op.outputs)
    copies = sum(
        _runs(graph, tuple(r for r in graph.values[value].repeats if r not in op.repeats))
        for value in listed
    )
    if copies > max(MOST_LISTED, len(listed)):
        raise GraphError(
            f"{name} takes or makes {copies:.3g} copies of values of repeats as one list; expected "
            f"{MOST_LISTED:,} at most, as it is priced copy by copy"
        )


SCHEMA = "rooftrace.graph/3"


class GraphFileError(GraphError):
    """A file that is no saved graph: names the file and the fault."""


_KIND = FileKind("saved graph", GraphFileError)


def save_graphs(graphs: Mapping[str, OpGraph], path: str | os.PathLike[str]) -> Path:
    """Write `graphs` by phase to `path` (gzip if it ends in .gz); nothing is left half-written."""
    path = Path(path)
    write_packed(path, graphs_bytes(graphs))
    return path


@collector_off.used()
def graphs_bytes(graphs: Mapping[str, OpGraph]) -> bytes:
    """The contents of a graph file, before gzip."""
    coded = (f"{_text(phase)}:{_graph_text(graph)}" for phase, graph in graphs.items())
    text = f'{{"schema":{_text(SCHEMA)},"graphs":{{{",".join(coded)}}}}}'
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate, as JSON escapes it


def _graph_text(graph: OpGraph) -> str:
    data = _encode(graph)
    values, ops = data.pop("values"), data.pop("ops")
    return f'{_text(data)[:-1]},"values":{_listed(values)},"ops":{_listed(ops)}}}'


def _listed(items: list[Any]) -> str:
    """A list as JSON, part by part: no signal is seen while one is written."""
    parts = (_text(items[n : n + 10_000])[1:-1] for n in range(0, len(items), 10_000))
    return f"[{','.join(parts)}]"


def _text(item: Any) -> str:
    return json.dumps(item, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@collector_off.used()
def load_graphs(path: str | os.PathLike[str]) -> dict[str, OpGraph]:
    """The graphs of a file by phase, each verified.

    Raises FileNotFoundError, or GraphFileError for a file that is truncated, of another kind or
    version, or larger than any trace (see `bounded`).
    """
    where = str(path)
    tell("reading graphs")
    data = json_of(text_of(Path(path), _KIND), where, _KIND)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise GraphFileError(
            f"{where}: schema is {schema!r:.60}, expected {SCHEMA!r}; "
            "make it with `rooftrace trace TARGET -o FILE`"
        )
    graphs = record_of(_File, data, where, _KIND).graphs.items()
    return {phase: decoded_graph(data, where, f"graphs.{phase}") for phase, data in graphs}


def decoded_graph(data: dict[str, Any], where: str, place: str) -> OpGraph:
    """A graph from plain data at a place of the file `where`, verified and bounded.

    Raises GraphFileError.
    """
    entry = record_of(_Graph, data, where, _KIND, place)
    record_of(_Facts, entry.model, where, _KIND, f"{place}.model")
    record_of(_Facts, entry.workload, where, _KIND, f"{place}.workload")
    try:
        return bounded(_decode(entry).verify())
    except ValueError as error:
        raise GraphFileError(f"{where}: {place}: a damaged graph: {error}") from None


def looks_saved(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an existing file that claims to hold saved graphs (by its first bytes)."""
    if not Path(path).is_file():
        return False
    try:
        return SCHEMA.encode() in beginning(path, 200)
    except zlib.error:
        return False


# -- encoding ------------------------------------------------------------------------------------


def _encode(graph: OpGraph) -> dict[str, Any]:
    words = defaultdict[str, int]()
    words.default_factory = words.__len__  # a new word gets the next number
    values = [
        [
            list(t.shape),
            words[t.dtype],
            list(t.stride),
            words[t.role],
            t.storage,
            t.name,
            list(t.repeats),
            _encode_neighbour(t.then),
            *([words[t.stored]] if t.stored or t.host else []),
            *([True] if t.host else []),
        ]
        for t in graph.values
    ]
    ops = [
        [
            words[op.target],
            {k: _encode_argument(v) for k, v in op.arguments.items()},
            list(op.outputs),
            words[op.module],
            op.call,
            words[op.part],
            words[op.kind],
            words[op.family],
            words[op.function],
            words[op.source],
            op.flops_torch,
            {name: _encode_argument(fact) for name, fact in op.facts.items()},
            list(op.assumptions),
            list(op.repeats),
            dict(op.steps),
            [_encode_argument(ref) for ref in op.holds],
            *(  # nothing for an op that works alone on the main stream
                [words[op.stream], op.collective and msgspec.structs.asdict(op.collective)]
                if op.stream or op.collective
                else []
            ),
        ]
        for op in graph.ops
    ]
    return {
        "phase": graph.phase,
        **{name: _encode_said(getattr(graph, name)) for name in _SAID},
        **{name: dict(getattr(graph, name)) for name in ("modules", "calls", "constants")},
        "schemas": {target: list(names) for target, names in sorted(graph.schemas.items())},
        "assumptions": [_encode_assumption(assumption) for assumption in graph.assumptions],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "repeats": [_encode_repeat(repeat) for repeat in graph.repeats],
        **_encode_groups(graph),
        "words": list(words),
        "values": values,
        "ops": ops,
    }


def _encode_groups(graph: OpGraph) -> dict[str, Any]:
    """Groups and mesh of a step of several processes; nothing for a step of one."""
    if not graph.groups and not graph.mesh:
        return {}
    groups = {name: msgspec.structs.asdict(group) for name, group in graph.groups.items()}
    return {"groups": groups, "mesh": dict(graph.mesh)}


class _Value(NamedTuple):
    """A tensor as it stands in a file; words by their number."""

    shape: tuple[int, ...]
    dtype: int
    stride: tuple[int, ...]
    role: int
    storage: int
    name: str
    repeats: tuple[int, ...]
    then: tuple[int, int, int] | None
    stored: int | None = None  # files without it declare nothing, or are older
    host: bool = False


class _Op(NamedTuple):
    """An op as it stands in a file; words by their number."""

    target: int
    arguments: dict[str, Any]
    outputs: tuple[int, ...]
    module: int
    call: int
    part: int
    kind: int
    family: int
    function: int
    source: int
    flops_torch: int | None
    facts: dict[str, bool | int | float | str | tuple[Any, ...] | dict[str, str] | None]
    assumptions: tuple[int, ...]
    repeats: tuple[int, ...]
    steps: dict[str, int]
    holds: list[dict[str, Any]]
    stream: int | None = None  # files without it are of one stream, or older
    collective: Collective | None = None


class _Repeat(NamedTuple):
    """A repeat as it stands in a file."""

    id: int
    times: int
    container: str | None
    first: int
    step: int
    source: str
    names: list[tuple[int, tuple[str, ...]]]
    assumptions: list[tuple[int, tuple[int, ...]]]


class _RoutingFacts(TypedDict, total=False):
    """The facts of an assumption on routing."""

    policy: str
    rows: int
    chosen: int | float  # of a process of several: the mean
    classes: int
    distinct: float
    drawn: int
    processes: int
    chosen_each: int


class _Assumption(NamedTuple):
    """An assumption as it stands in a file."""

    id: int
    kind: str
    where: str
    text: str
    value: Any
    op: str
    facts: _RoutingFacts = _RoutingFacts()  # files without it are older, or this is not on routing


@dataclass(frozen=True, slots=True)
class _Ref:
    """A Ref as it stands in a file."""

    ref: int
    then: tuple[int, int, int] | None = None
    every: bool = False


class _Facts(TypedDict, total=False):
    """The facts of the model and the workload that estimates read."""

    name: str
    dtype: str | None
    priced_dtype: str | None
    weights_dtype: str | None
    kv_dtype: str | None
    declared_kv_dtype: str | None
    bytes_stored: int
    stored_as: str
    params: int
    params_trainable: int
    bytes_parameters: int
    bytes_buffers: int
    batch: int | None
    seq: int | None
    kv: int | None
    item: str
    items: int | None
    optimizer: str | None
    torch: str | None
    stages: tuple[int, ...]  # of a pipeline that the graph stands for
    stage_count: int
    schedule: str
    microbatches: int
    handed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """A graph as it stands in a file."""

    phase: str
    model: dict[str, Any]
    workload: dict[str, Any]
    provenance: dict[str, Any]
    modules: dict[str, str]
    calls: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    schemas: dict[str, tuple[str, ...]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    assumptions: list[_Assumption]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    repeats: list[_Repeat]
    words: list[str]
    values: list[_Value]
    ops: list[_Op]


@dataclass(frozen=True, slots=True)
class _File:
    """A graph file."""

    schema: str
    graphs: dict[str, dict[str, Any]]


def _decode(data: _Graph) -> OpGraph:
    def word(number: int) -> str:
        if not 0 <= number < len(data.words):
            raise GraphError(f"there is no word {number}; there are {len(data.words)} words")
        return data.words[number]

    values = tuple(
        Tensor(
            **{
                **item._asdict(),
                "dtype": word(item.dtype),
                "role": word(item.role),
                "then": _neighbour(item.then),
                "stored": "" if item.stored is None else word(item.stored),
            }
        )
        for item in data.values
    )
    same = {item.name: getattr(data, item.name) for item in fields(data) if item.name != "words"}
    decoded = {
        "values": values,
        "ops": tuple(_decode_op(number, op, word) for number, op in enumerate(data.ops)),
        "assumptions": tuple(
            Assumption(*item._replace(value=_decode_said(item.value))) for item in data.assumptions
        ),
        "repeats": tuple(Repeat(*r[:6], dict(r.names), dict(r.assumptions)) for r in data.repeats),
        **{name: _decode_said(same[name]) for name in _SAID},
    }
    return OpGraph(**{**same, **decoded})


_SAID = ("model", "workload", "provenance")
"""The fields of a graph that are plain data of any depth."""
_WORDS = ("target", "module", "part", "kind", "family", "function", "source")
"""The fields of an op that are words."""


def _decode_op(number: int, entry: _Op, word: Callable[[int], str]) -> Op:
    arguments = {name: _decode_argument(item) for name, item in entry.arguments.items()}
    return Op(
        **{
            **entry._asdict(),
            **{name: word(getattr(entry, name)) for name in _WORDS},
            "id": number,
            "arguments": arguments,
            "facts": {name: _decode_argument(fact) for name, fact in entry.facts.items()},
            "inputs": tuple(refs(arguments)),
            "holds": tuple(_decode_argument(ref) for ref in entry.holds),
            "stream": "" if entry.stream is None else word(entry.stream),
        }
    )


def _encode_repeat(repeat: Repeat) -> list[Any]:
    *plain, names, assumptions = msgspec.structs.astuple(repeat)
    lists = [[[key, list(items)] for key, items in m.items()] for m in (names, assumptions)]
    return [*plain, *lists]


def _encode_assumption(item: Assumption) -> list[Any]:
    facts = [dict(item.facts)] if item.facts else []
    value = _encode_said(item.value)
    return [item.id, item.kind, item.where, item.text, value, item.op, *facts]


def _encode_neighbour(then: Neighbour | None) -> list[int] | None:
    return None if then is None else [then.repeat, then.value, then.shift]


def _neighbour(item: tuple[int, int, int] | None) -> Neighbour | None:
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
    return _encode_number(item)


def _encode_said(item: Any) -> Any:
    """Plain data of any depth, without numbers that JSON has not."""
    if isinstance(item, Mapping):
        return {key: _encode_said(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_encode_said(value) for value in item]
    return _encode_number(item)


def _encode_number(item: Any) -> Any:
    finite = not isinstance(item, float) or math.isfinite(item)
    return item if finite else {_NUMBER: repr(item)}


_NUMBER = "number"
_NUMBERS = {repr(number): number for number in (math.inf, -math.inf, math.nan)}
"""A NaN is always the same object, so that containers of it are equal."""


def _is_number(item: Any) -> bool:
    return len(item) == 1 and item.get(_NUMBER) in _NUMBERS


def _decode_said(item: Any) -> Any:
    if isinstance(item, dict):
        if _is_number(item):
            return _NUMBERS[item[_NUMBER]]
        return {key: _decode_said(value) for key, value in item.items()}
    return [_decode_said(value) for value in item] if isinstance(item, list) else one_nan(item)


def _decode_argument(item: Any) -> Argument:
    if isinstance(item, dict):
        if _is_number(item):
            return _NUMBERS[item[_NUMBER]]
        ref = record_of(_Ref, item, "an argument", _KIND)
        return Ref(ref.ref, _neighbour(ref.then), ref.every)
    if isinstance(item, (list, tuple)):
        return tuple(_decode_argument(x) for x in item)
    return one_nan(item)
