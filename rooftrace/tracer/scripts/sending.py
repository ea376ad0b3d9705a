"""The record of a script as bytes: what its process sends is read as a file is, and checked."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import GraphFileError, decoded_graph, graphs_bytes
from rooftrace.tracer.scripts.records import Script

_FROM = "the process of the script"


def script_bytes(script: Script) -> bytes:
    """A script as bytes, for `script_of`."""
    graphs = {str(place): graph for place, graph in enumerate(script.graphs)}
    return msgspec.msgpack.encode((graphs_bytes(graphs), replace(script, graphs=())))


def script_of(content: bytes) -> Script:
    """The script of bytes.  Raises GraphFileError for those that `script_bytes` has not made."""
    try:
        graphs, script = msgspec.msgpack.decode(content, type=tuple[bytes, Script])
    except msgspec.MsgspecError as error:
        raise GraphFileError(f"{_FROM}: no record of it: {error}") from error
    return replace(script, graphs=tuple(graph for _, graph in _graphs(graphs)))


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
