"""From plain records back to a `torch.fx.GraphModule` that runs on real tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor as TorchTensor, fx

from rooftrace.graph import marks
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Argument, GraphError, Op, Ref, refs
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import own_ops
from rooftrace.tracer.values import torch_dtype


class GraphState(torch.nn.Module):
    """Holds the tensors that a rebuilt graph reads by name."""


def to_fx(graph: OpGraph, state: Mapping[str, TorchTensor] | None = None) -> fx.GraphModule:
    """A `torch.fx.GraphModule` that runs the ops of `graph` on real tensors.

    Its inputs are the graph's inputs in order; repeats are written out, and the node of an op has
    the op's id in `graph.expand()` under meta["op"].  state: tensors by name
    for external values (parameters, buffers); constants that the graph knows are filled in, what
    is missing stays on meta.  Exchanges with other processes run in groups of this process, as
    inside `fake_mesh`.  Raises GraphError for an op that is not registered, a precision that torch
    has not, and for an exchange that cannot run.
    """
    _check_exchanges(graph)
    graph = graph.expand()
    result = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    root = GraphState()
    for index in graph.inputs:
        name = graph.values[index].name or f"input_{index}"
        nodes[index] = result.placeholder(name.replace(".", "_"))
    attributes: dict[str, str] = {}
    for index in graph.external:
        if index not in nodes:
            name = graph.values[index].name or f"value_{index}"
            if name not in attributes:
                attributes[name] = f"{name.replace('.', '_')}_{index}"
                root.register_buffer(attributes[name], _stored(graph, index, name, state or {}))
            nodes[index] = result.get_attr(attributes[name])
    for op in graph.ops:
        if op.name not in marks.MEMORY_MARKS:  # whoever runs the graph lets go of tensors itself
            _add(op, result, nodes)
    result.output(tuple(nodes[index] for index in graph.outputs))
    return fx.GraphModule(root, result)


def _check_exchanges(graph: OpGraph) -> None:
    """Raise GraphError for streams, and exchanges whose group is not here."""
    for op in graph.ops:
        alone = [name for name, item in op.arguments.items() if str(item).startswith(_OBJECT)]
        if op.name in marks.MARKS - marks.MEMORY_MARKS or (op.collective is not None and alone):
            raise GraphError(
                f"{op.target} cannot be rebuilt: a graph does not keep streams and process groups "
                "that are objects, as FSDP2 and DDP have them; trace the module before it is "
                "wrapped, and rebuild that"
            )
        if op.collective is None or _is_here(op.arguments.get("group_name")):
            continue
        sizes = dict(graph.mesh) or {"axis": max(graph.groups[op.collective.group].ranks) + 1}
        raise GraphError(
            f"{op.target} is an exchange in the process group {op.collective.group!r}, which this "
            f"process has not: rebuild and run the graph inside rt.tools.fake_mesh({sizes})"
        )


_OBJECT = "ScriptObject:"
"""How an argument begins of which a graph keeps the kind only."""


def _is_here(group: Argument) -> bool:
    """Whether this process has a group of this name."""

    try:
        torch_private.resolve_process_group(str(group))
    except (RuntimeError, ValueError):
        return False
    return True


def _stored(graph: OpGraph, index: int, name: str, state: Mapping[str, TorchTensor]) -> TorchTensor:
    tensor = graph.values[index]
    if name in state:
        return state[name]
    dtype = torch_dtype(tensor.dtype)
    content = bytearray.fromhex(graph.constants.get(name, ""))
    if content:
        return torch.frombuffer(content, dtype=dtype).reshape(tensor.shape)
    device = "meta" if tensor.elements else "cpu"
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=device)


def _add(op: Op, result: fx.Graph, nodes: dict[int, fx.Node]) -> None:
    """Append one op to an fx graph."""
    target = _overload(op.target)
    args, kwargs = _call(target, op.arguments, nodes)
    node = result.call_function(_RUNS_AS.get(target, target), args, kwargs)
    node.meta.update(op=op.id, module=op.module)
    returned = len(target._schema.returns)
    if len(op.outputs) == 1 and returned == 1 and not _returns_list(target):
        nodes[op.outputs[0]] = node
    elif returned:
        for position, value in zip(_positions(op), op.outputs, strict=True):
            nodes[value] = result.call_function(operator.getitem, (node, position))
    else:  # a void in-place op writes its list arguments, whose nodes stay the same
        for value, other in zip(op.outputs, _written(target, op.arguments), strict=True):
            nodes[value] = nodes[other]
    if op.collective is not None and op.target.startswith("_c10d_functional."):
        # A tensor that was recorded on meta is waited for by nobody.
        wait = torch.ops._c10d_functional.wait_tensor.default
        for value in op.outputs:
            nodes[value] = result.call_function(wait, (nodes[value],))


def histc(values: TorchTensor, bins: int = 100, min: float = 0, max: float = 0) -> TorchTensor:
    """`torch.histc`, also of integers on a CPU, where PyTorch counts floats only."""
    if values.device.type != "cpu" or values.is_floating_point():
        return torch.histc(values, bins, min=min, max=max)
    return torch.histc(values.double(), bins, min=min, max=max).to(values.dtype)


def wide_mm(a: TorchTensor, b: TorchTensor, out_dtype: torch.dtype) -> TorchTensor:
    """`torch.mm` with a result in another precision, also on a CPU, which has no such kernel."""
    if a.device.type != "cpu":
        return torch.mm(a, b, out_dtype=out_dtype)
    return a.to(out_dtype) @ b.to(out_dtype)


_RUNS_AS = {
    torch.ops.aten.histc.default: histc,
    torch.ops.aten.mm.dtype: wide_mm,
    torch.ops.aten.bmm.dtype: wide_mm,
}
"""Replacements of ops for which some devices have no kernel."""


def _positions(op: Op) -> list[int]:
    """Positions of the outputs among the op's results: a backward omits unneeded ones."""
    mask = op.arguments.get("output_mask")
    if isinstance(mask, tuple) and sum(mask) == len(op.outputs):
        return [position for position, wanted in enumerate(mask) if wanted]
    return list(range(len(op.outputs)))


def written(target: str, arguments: Mapping[str, Argument]) -> list[int]:
    """The values that an op writes in place, in order.  Raises GraphError for an unknown op."""
    return _written(_overload(target), arguments)


def _written(target: Any, arguments: Mapping[str, Argument]) -> list[int]:
    """The values that a call writes in place, in order."""
    names = [
        a.name
        for a in target._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return [value for name in names for value in refs(arguments.get(name))]


def _returns_list(target: Any) -> bool:
    return str(target._schema.returns[0].type).startswith("List")


def _overload(target: str) -> Any:
    namespace, name, overload = target.split(".")
    try:
        library = own_ops() if namespace == "rooftrace" else getattr(torch.ops, namespace)
        return getattr(getattr(library, name), overload)
    except AttributeError:
        raise GraphError(
            f"{target} is not registered in this process: import the package that "
            "defines it before running the graph"
        ) from None


def _call(
    target: Any, arguments: Mapping[str, Argument], nodes: Mapping[int, fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    positional = True
    for parameter in target._schema.arguments:
        if parameter.name not in arguments:
            positional = False
            continue
        value = _rebuild(arguments[parameter.name], nodes)
        if positional and not parameter.kwarg_only:
            args.append(value)
        else:
            kwargs[parameter.name] = value
    return tuple(args), kwargs


def _rebuild(item: Argument, nodes: Mapping[int, fx.Node]) -> Any:
    if type(item) is Ref:
        return nodes[item.id]
    if isinstance(item, tuple):
        return [_rebuild(x, nodes) for x in item]
    if isinstance(item, str):
        kind, _, rest = item.partition(":")
        if kind == "dtype":
            return torch_dtype(rest)
        if kind == "complex":
            real, imaginary = rest.split(",")
            return complex(float(real), float(imaginary))
        if kind == "device":
            return None  # the rebuilt graph runs where its tensors are
        if kind in ("layout", "memory_format"):
            return getattr(torch, rest.removeprefix("torch."))
    return item
