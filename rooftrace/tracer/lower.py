"""From the recorded fx graph to plain records, and back.

`lower` is where fx's `node.meta` ends: what goes in is a graph made by `capture`, what comes out is an
OpGraph that verifies.  `to_fx` rebuilds a runnable `torch.fx.GraphModule` from the records.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch import fx
from torch.utils.flop_counter import flop_registry

from rooftrace.tracer.capture import META_KEY, Entry, Recorded, Recorder, Spec
from rooftrace.tracer.graph import Argument, Assumption, GraphError, Op, OpGraph, Ref, Tensor, refs

from rooftrace.tracer.values import UNINITIALISED

_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e4m3fnuz: "fp8_e4m3", torch.float8_e5m2fnuz: "fp8_e5m2",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "uint8", torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64",
    torch.bool: "bool", torch.complex64: "complex64", torch.complex128: "complex128",
    torch.complex32: "complex32",
}
_BY_NAME: Mapping[str, torch.dtype] = {
    **{name: dtype for dtype, name in reversed(list(_DTYPES.items()))},
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

_ENTRY_ROLES = {"parameter": "weights", "buffer": "weights", "table": "constants",
                "input": "activations", "constant": "constants", "kv": "kv",
                "optimizer": "optimizer", "gradient": "gradients"}
_RANDOM_HINTS = ("rand", "bernoulli", "dropout", "normal_", "uniform_", "exponential_")


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype ("bf16"); a dtype without one keeps torch's."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of our names.  Raises GraphError where torch has none (int4, nvfp4)."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise GraphError(f"{name!r} has no torch dtype: it can be priced but not run") from None


def lower(recorder: Recorder, outputs: Sequence[TorchTensor], *, phase: str,
          kv_storages: Collection[int] = (), gradient_storages: Collection[int] = (),
          assumptions: Sequence[Assumption] = (), model: Mapping[str, Any] | None = None,
          workload: Mapping[str, Any] | None = None,
          provenance: Mapping[str, Any] | None = None) -> OpGraph:
    """The OpGraph of everything that `recorder` recorded, verified.

    outputs: the tensors that the step returns.  kv_storages, gradient_storages: storages that are
    handed to the next call, or hold gradients of parameters.
    """
    result_nodes = [recorder.node_of(t) for t in outputs]
    if recorder.graph.find_nodes(op="output") == []:
        recorder.graph.output(tuple(result_nodes))
    builder = _Builder(frozenset(kv_storages), frozenset(gradient_storages))
    for node in recorder.graph.nodes:
        builder.add(node)
    return OpGraph(
        phase=phase, values=tuple(builder.values), ops=tuple(builder.ops), inputs=tuple(builder.inputs),
        outputs=tuple(builder.value_of(node) for node in result_nodes), modules=dict(recorder.modules),
        assumptions=tuple(assumptions), model=dict(model or {}), workload=dict(workload or {}),
        provenance=dict(provenance or {})).verify()


class _Builder:
    """Accumulates values and ops while walking the fx graph once."""

    def __init__(self, kv: frozenset[int], gradients: frozenset[int]) -> None:
        self.values: list[Tensor] = []
        self.ops: list[Op] = []
        self.inputs: list[int] = []
        self._owners: dict[int, int] = {}
        self._single: dict[fx.Node, int] = {}
        self._multiple: dict[fx.Node, tuple[int, ...]] = {}
        self._kv, self._gradients = kv, gradients
        self._flops: dict[Any, int | None] = {}
        self._names: dict[Any, tuple[str, tuple[str, ...]]] = {}

    def value_of(self, node: fx.Node) -> int:
        """The value id of an fx node that stands for one tensor."""
        return self._single[node]

    def add(self, node: fx.Node) -> None:
        """Translate one fx node."""
        if node.op in ("placeholder", "get_attr"):
            entry: Entry = node.meta[META_KEY]
            value = self._value(entry.spec, self._entry_role(entry), entry.name)
            self._single[node] = value
            if node.op == "placeholder":
                self.inputs.append(value)
        elif node.op == "call_function":
            if node.target is operator.getitem:
                base, index = node.args
                assert isinstance(base, fx.Node) and isinstance(index, int)
                self._single[node] = self._multiple[base][index]
            else:
                self._op(node, node.meta[META_KEY])

    def _entry_role(self, entry: Entry) -> str:
        if entry.spec.storage in self._kv:
            return "kv"
        return _ENTRY_ROLES[entry.kind]

    def _value(self, spec: Spec, role: str, name: str = "") -> int:
        index = len(self.values)
        owner = self._owners.setdefault(spec.storage, index)
        if owner != index:
            role = self.values[owner].role
        self.values.append(Tensor(spec.shape, dtype_name(spec.dtype), spec.stride, role, owner, name))
        return index

    def _op(self, node: fx.Node, recorded: Recorded) -> None:
        target, names = self._schema(node.target)
        arguments: dict[str, Argument] = {}
        for name, item in zip(names, node.args, strict=False):
            arguments[name] = self._argument(item)
        for key, item in node.kwargs.items():
            arguments[key] = self._argument(item)
        inputs = tuple(refs(arguments))
        role = self._role(recorded, inputs, target)
        outputs = tuple(
            self._value(spec, "kv" if spec.storage in self._kv else
                        "gradients" if spec.storage in self._gradients else role)
            for spec in recorded.specs)
        if len(outputs) == 1:
            self._single[node] = outputs[0]
        self._multiple[node] = outputs
        facts = dict(recorded.facts)
        facts.pop("void", None)
        allocates = target.rpartition(".")[0] in UNINITIALISED
        kind = ("sync" if recorded.sync else
                "view" if outputs and (recorded.view or allocates) else "kernel")
        flops = self._flops_torch(node, recorded)
        self.ops.append(Op(
            len(self.ops), target, arguments, inputs, outputs, recorded.module, recorded.call,
            recorded.part, kind, "other", recorded.function, recorded.source, flops, facts,
            tuple(sorted(recorded.taint))))

    def _role(self, recorded: Recorded, inputs: Sequence[int], target: str) -> str:
        """The role of a new storage that this op makes."""
        if recorded.part in ("backward", "optimizer"):
            return "temporary"
        if any(hint in target for hint in _RANDOM_HINTS):
            return "activations"
        roles = {self.values[i].role for i in inputs}
        if roles <= {"constants"}:
            return "constants"
        if roles <= {"constants", "weights"}:
            return "temporary"  # a cast or rearranged copy of weights, made anew every step
        return "activations"

    def _schema(self, func: Any) -> tuple[str, tuple[str, ...]]:
        found = self._names.get(func)
        if found is None:
            names = tuple(a.name for a in func._schema.arguments)
            found = self._names[func] = (f"{func.namespace}.{func._opname}.{func._overloadname}", names)
        return found

    def _argument(self, item: Any) -> Argument:
        if isinstance(item, fx.Node):
            return Ref(self._single[item])
        if isinstance(item, (list, tuple)):
            return tuple(self._argument(x) for x in item)
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, complex):
            return f"complex:{item.real!r},{item.imag!r}"
        if isinstance(item, torch.dtype):
            return f"dtype:{dtype_name(item)}"
        return f"{type(item).__name__}:{item}"

    def _flops_torch(self, node: fx.Node, recorded: Recorded) -> int | None:
        """What torch's registry counts for this op; None where it has no formula for it."""
        target: Any = node.target
        formula: Callable[..., int] | None = flop_registry.get(target.overloadpacket)
        if formula is None:
            return None
        shapes: list[Any] = []

        def shaped(item: Any) -> Any:
            if isinstance(item, fx.Node):
                tensor = self.values[self._single[item]]
                stub = torch.empty_strided(tensor.shape, tensor.stride, device="meta")
                shapes.append((tensor.shape, tensor.stride))
                return stub
            if isinstance(item, (list, tuple)):
                return [shaped(x) for x in item]
            shapes.append(repr(item))
            return item
        args = [shaped(a) for a in node.args]
        kwargs = {k: shaped(v) for k, v in node.kwargs.items()}
        outs = [s.shape for s in recorded.specs]
        key = (target, repr(shapes), tuple(outs))
        if key not in self._flops:
            made = [torch.empty(shape, device="meta") for shape in outs]
            out_val: Any = made[0] if len(made) == 1 else tuple(made)
            try:
                self._flops[key] = int(formula(*args, **kwargs, out_val=out_val))
            except (AssertionError, TypeError, ValueError, IndexError, AttributeError, RuntimeError):
                self._flops[key] = None  # torch's own formula refuses these shapes
        return self._flops[key]


# -- back to fx -------------------------------------------------------------------------------------

class GraphState(torch.nn.Module):
    """Holds the tensors that a rebuilt graph reads by name."""


def to_fx(graph: OpGraph, state: Mapping[str, TorchTensor] | None = None) -> fx.GraphModule:
    """A `torch.fx.GraphModule` that runs the ops of `graph` on real tensors.

    Its inputs are the graph's inputs in order.  state: tensors by name for everything else that no op
    makes (parameters, buffers, constants); missing ones are left on meta.
    """
    result = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    root = GraphState()
    attributes: dict[str, str] = {}
    given = state or {}
    for index in graph.external:
        tensor = graph.values[index]
        if index in graph.inputs:
            continue
        name = tensor.name or f"value_{index}"
        attribute = attributes.setdefault(name, name.replace(".", "_"))
        value = given.get(name)
        if value is None:
            value = torch.empty_strided(tensor.shape, tensor.stride, dtype=torch_dtype(tensor.dtype),
                                        device="meta")
        root.register_buffer(attribute, value)
    for index in graph.inputs:
        name = graph.values[index].name or f"input_{index}"
        nodes[index] = result.placeholder(name.replace(".", "_"))
    for index in graph.external:
        if index not in nodes:
            name = graph.values[index].name or f"value_{index}"
            nodes[index] = result.get_attr(attributes[name])
    for op in graph.ops:
        target = _overload(op.target)
        args, kwargs = _call(target, op.arguments, nodes)
        node = result.call_function(target, args, kwargs)
        node.meta["module"] = op.module
        returned = len(target._schema.returns)
        if len(op.outputs) == 1 and returned == 1 and not _returns_list(target):
            nodes[op.outputs[0]] = node
        elif returned:
            for position, value in enumerate(op.outputs):
                nodes[value] = result.call_function(operator.getitem, (node, position))
    result.output(tuple(nodes[i] for i in graph.outputs))
    return fx.GraphModule(root, result)


def _returns_list(target: Any) -> bool:
    return str(target._schema.returns[0].type).startswith("List")


def _overload(target: str) -> Any:
    namespace, name, overload = target.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise GraphError(f"{target} is not registered in this process: import the package that defines "
                         "it before running the graph") from None


def _call(target: Any, arguments: Mapping[str, Argument],
          nodes: Mapping[int, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        if kind == "layout":
            return getattr(torch, rest.removeprefix("torch."))
        if kind == "memory_format":
            return getattr(torch, rest.removeprefix("torch."))
    return item
