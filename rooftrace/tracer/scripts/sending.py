"""The record of a script as bytes: what its process sends is read as a file is, and checked."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import decoded_graph, graphs_bytes
from rooftrace.tracer.scripts.records import Script

_FROM = "the process of the script"


def script_bytes(script: Script) -> bytes:
    """A script as bytes, for `script_of`."""
    graphs = {str(place): graph for place, graph in enumerate(script.graphs)}
    return msgspec.msgpack.encode((graphs_bytes(graphs), replace(script, graphs=())))


def script_of(content: bytes) -> Script:
    """The script of bytes.  Raises GraphFileError for those that `script_bytes` has not made."""
    graphs, script = msgspec.msgpack.decode(content, type=tuple[bytes, Script])
    return replace(script, graphs=tuple(_graphs(graphs)))


def graph_bytes(graph: OpGraph, compiled: bool) -> bytes:
    """A graph, and whether it runs compiled, as bytes, for `graph_of`."""
    return graphs_bytes({"compiled" if compiled else "eager": graph})


def graph_of(content: bytes) -> tuple[OpGraph, bool]:
    """The graph of bytes, and whether it runs compiled."""
    ((how, data),) = msgspec.json.decode(content)["graphs"].items()
    return decoded_graph(data, _FROM, how), how == "compiled"


def _graphs(content: bytes) -> list[OpGraph]:
    graphs: dict[str, Any] = msgspec.json.decode(content)["graphs"]
    return [decoded_graph(data, _FROM, f"graphs.{place}") for place, data in graphs.items()]
