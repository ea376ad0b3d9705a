"""The record of a script as bytes: what its process sends is read as a file is, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import GraphFileError, decoded_graph, graphs_bytes
from rooftrace.tracer.scripts.records import Derived, Script, graph_form

_FROM = "the process of the script"


def script_bytes(script: Script, derived: Sequence[Derived] = ()) -> bytes:
    """A script as bytes, for `script_of`.  derived: how graphs follow that are not sent."""
    left = {place for each in derived for place in each.places.values()}
    graphs = {str(i): graph for i, graph in enumerate(script.graphs) if i not in left}
    content = graphs_bytes(graphs), list(derived), replace(script, graphs=())
    return msgspec.msgpack.encode(content)


def script_of(content: bytes) -> Script:
    """The script of bytes.  Raises GraphFileError for those that `script_bytes` has not made."""
    try:
        sent, derived, script = msgspec.msgpack.decode(
            content, type=tuple[bytes, list[Derived], Script]
        )
    except msgspec.MsgspecError as error:
        raise GraphFileError(f"{_FROM}: no record of it: {error}") from error
    graphs = {int(name): graph for name, graph in _graphs(sent)}
    for each in derived:
        form = graph_form({length: graphs[place] for length, place in each.samples.items()})
        graphs.update({place: form.at((length,)) for length, place in each.places.items()})
    return replace(script, graphs=tuple(graph for _, graph in sorted(graphs.items())))


def graph_of(content: bytes) -> OpGraph:
    """The graph of bytes that `graphs_bytes` has made.  Raises GraphFileError, as `script_of`."""
    ((_, graph),) = _graphs(content)
    return graph


def _graphs(content: bytes) -> list[tuple[str, OpGraph]]:
    try:
        graphs = msgspec.json.decode(content, type=_Sent).graphs
    except msgspec.MsgspecError as error:
        raise GraphFileError(f"{_FROM}: no graphs: {error}") from error
    return [(name, decoded_graph(data, _FROM, name)) for name, data in graphs.items()]


class _Sent(msgspec.Struct):
    graphs: dict[str, dict[str, Any]]
