"""What Inductor would launch for a graph of ours on a CUDA device, on a machine without one.

A graph goes back to torch.fx (`to_fx`), through Inductor's decompositions on fake CUDA
tensors, and through its lowering and scheduler; no code is generated.  Every node remembers the op
of ours that it came from.  Needs the triton wheel, no GPU.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import decomposition, ir
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.ops_handler import OpCounterCSE
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.utils import get_fused_kernel_name
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.rebuild import to_fx
from rooftrace.tracer.values.trees import torch_dtype

CUDA = torch.device("cuda", 0)

H100 = types.SimpleNamespace(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    minor=0,
    name="NVIDIA H100",
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    gcnArchName="",
    L2_cache_size=50 << 20,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    is_integrated=0,
)


@dataclass(frozen=True)
class Kernel:
    """One node of Inductor's schedule.

    ops: ids of our ops that it computes at least a part of.  home: those of them whose result it
    writes (or, if nobody writes it, is the first to compute).  bytes: through HBM.  around: those
    for what stands beside a library kernel: copies to other layouts, biases of convolutions.
    extern: a library kernel.  name: under which a profiler shows it; "" for a view of another's
    result.  shapes: of the tensors that it is called with.
    """

    ops: tuple[int, ...]
    home: tuple[int, ...]
    bytes: int
    around: int
    extern: bool
    name: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()


def pretend_cuda() -> None:
    """Answer every question about the device as an H100 would."""
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: (9, 0),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    interface = device_interface.CudaInterface
    answers = {
        "get_device_properties": lambda device=None: H100,
        "get_compute_capability": lambda device=None: 90,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "is_bf16_supported": lambda *args, **kwargs: True,
    }
    for name, answer in answers.items():
        setattr(interface, name, staticmethod(answer))
    interface.Worker.get_device_properties = staticmethod(lambda device=None: H100)
    interface.Worker.current_device = staticmethod(lambda: 0)
    inductor_config.fx_graph_cache = False
    inductor_config.force_disable_caches = True


class _OnCuda(fx.Interpreter):
    """Runs a rebuilt graph with every device argument turned into the fake GPU."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if any(argument.name == "device" for argument in _schema(target)):
            kwargs = {**kwargs, "device": CUDA}
        return super().call_function(target, args, kwargs)


def _schema(target: Any) -> Any:
    return getattr(getattr(target, "_schema", None), "arguments", ())


def kernels_of(graph: OpGraph) -> list[Kernel]:
    """Inductor's kernels for `graph`, in launch order."""
    module = to_fx(graph)
    for node in module.graph.nodes:
        if "op" in node.meta:
            node.meta["custom"] = {"op": node.meta["op"]}
    module.graph.eliminate_dead_code()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    state = dict(module.named_buffers())

    def on_cuda(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=CUDA)

    with fake:
        inputs = [
            on_cuda(
                graph.values[i].shape, graph.values[i].stride, torch_dtype(graph.values[i].dtype)
            )
            for i in graph.inputs
        ]
        stored = [on_cuda(t.shape, t.stride(), t.dtype) for t in state.values()]

    def run(*tensors: torch.Tensor) -> Any:
        for name, tensor in zip(state, tensors[len(inputs) :], strict=True):
            module._buffers[name] = tensor
        with traceback.preserve_node_meta():
            return _OnCuda(module).run(*tensors[: len(inputs)])

    with torch.no_grad(), fake, _without_guards():
        lowered = make_fx(
            _functional(run, graph), decomposition_table=decomposition.select_decomp_table()
        )(*inputs, *stored)
    lowered.graph.eliminate_dead_code()
    with fake, V.set_fake_mode(fake), torch.no_grad():
        remove_noop_ops(lowered.graph)
        view_to_reshape(lowered)
        lowered.graph.eliminate_dead_code()
        lowered.recompile()
        lowering = GraphLowering(lowered, example_inputs=[*inputs, *stored], is_inference=True)
        watch = _Watch()
        with watch.install(), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs, *stored)
            return _read(Scheduler(lowering.operations), lowering, watch)


def _without_guards() -> ExitStack:
    """Methods that decompositions call, without the device guard that needs a CUDA build."""
    contiguous, getitem = torch.Tensor.contiguous, torch.Tensor.__getitem__

    def copied(x: torch.Tensor, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
        if x.is_contiguous(memory_format=memory_format):
            return contiguous(x, memory_format=memory_format)
        return torch.ops.aten.clone.default(x, memory_format=memory_format)

    def item(x: torch.Tensor, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(place, torch.Tensor) for place in places):
            return getitem(x, index)
        indices = [place if isinstance(place, torch.Tensor) else None for place in places]
        return torch.ops.aten.index.Tensor(x, indices)

    methods: dict[str, Callable[..., Any]] = {
        "contiguous": copied,
        "__getitem__": item,
        "__invert__": lambda x: torch.ops.aten.bitwise_not.default(x),
        "copy_": lambda x, source, *rest: torch.ops.aten.copy_.default(x, source),
    }
    stack = ExitStack()
    for name, method in methods.items():
        stack.enter_context(mock.patch.object(torch.Tensor, name, method))
    return stack


def _functional(run: Callable[..., Any], graph: OpGraph) -> Callable[..., Any]:
    writes = any(op.name.endswith("_") for op in graph.ops)
    return torch.func.functionalize(run, remove="mutations") if writes else run


class _Watch:
    """Which of our ops each loop body computes, and which of them library kernels run.

    Inductor's own `origins` name everything upstream of a layout copy.  Here every loop body is
    wrapped when it is made, and tells its op each time it is evaluated, inlined ones included.
    """

    def __init__(self) -> None:
        self.seen: set[fx.Node] = set()
        self.extern: set[int] = set()

    def install(self) -> ExitStack:
        """Watch until the stack is closed."""
        watch, plain, register = self, ir.Loops.__post_init__, GraphLowering.register_operation

        def wrapped(loops: Any) -> None:
            plain(loops)
            node, body = watch.current(), loops.inner_fn
            if _op_of(node) is not None:

                def inner(*args: Any, **kwargs: Any) -> Any:
                    watch.seen.add(node)
                    return body(*args, **kwargs)

                object.__setattr__(loops, "inner_fn", inner)

        def registered(graph: Any, operation: Any) -> str:
            name: str = register(graph, operation)
            op = _op_of(watch.current())
            if op is not None and isinstance(operation, ir.ExternKernel):
                watch.extern.add(op)
            return name

        stack = ExitStack()
        stack.enter_context(mock.patch.object(ir.Loops, "__post_init__", wrapped))
        stack.enter_context(mock.patch.object(GraphLowering, "register_operation", registered))
        return stack

    def current(self) -> Any:
        """The node that is being lowered."""
        return V.graph.current_node if isinstance(V.graph, GraphLowering) else None

    def computes(self, buffer: Any) -> set[fx.Node]:
        """Nodes in one buffer's loop body."""
        data = getattr(buffer, "data", None)
        if not isinstance(data, ir.Loops):
            return set()
        self.seen = set()
        counter = OpCounterCSE(V.MockHandler())
        allow = mock.patch.object(ir.FlexibleLayout, "allow_indexing", True)
        with V.set_ops_handler(counter), allow:
            data.inner_fn(*data.inner_fn_args())
        return self.seen


def _op_of(node: Any) -> int | None:
    custom = node.meta.get("custom") if node is not None else None
    return custom.get("op") if custom else None


def _is_used(node: fx.Node) -> bool:
    """Whether another op uses it."""
    return any(_op_of(user) != _op_of(node) for user in node.users)


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _read(scheduler: Any, lowering: Any, watch: _Watch) -> list[Kernel]:
    order = {node: index for index, node in enumerate(lowering.module.graph.nodes)}
    written: dict[fx.Node, int] = {}
    first: dict[fx.Node, int] = {}
    found: list[tuple[set[int], int, int, bool, str, tuple[tuple[int, ...], ...]]] = []
    outputs = set(lowering.get_output_names())
    for scheduled in scheduler.nodes:
        if isinstance(scheduled, NopKernelSchedulerNode):
            continue
        nodes: set[fx.Node] = set()
        own = []
        for part in scheduled.get_nodes():
            computed = {n for n in watch.computes(part.node) if _op_of(n) not in watch.extern}
            origin = getattr(part.node, "origin_node", None)
            if origin in computed:
                written[origin] = len(found)
            own += [part] if computed else []
            nodes |= computed
        for node in nodes:
            first.setdefault(node, len(found))
        size = 0 if scheduled.is_extern() else _bytes(scheduled.get_nodes(), outputs)
        around = size - _bytes(own, outputs) if own else size
        ops = {_op_of(n) for n in nodes}
        names = _called(scheduled, lowering, sum(not entry[3] for entry in found))
        found.append((ops, size, max(0, around), scheduled.is_extern(), *names))  # type: ignore[arg-type]
    home: dict[int, int] = {}
    # The largest node of an op that others use is its result; sums for weights stand beside it.
    for node in sorted(first, key=lambda n: (_is_used(n), _elements(n), order[n])):
        home[_op_of(node)] = written.get(node, first[node])  # type: ignore[index]
    return [
        Kernel(tuple(sorted(ops)), tuple(sorted(op for op in ops if home[op] == i)), *others)
        for i, (ops, *others) in enumerate(found)
    ]


def _called(scheduled: Any, lowering: Any, number: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The name and the shapes with which a kernel is called; number: of those that it writes."""
    if scheduled.is_extern():
        node = scheduled.node
        overload, kernel = getattr(node, "op_overload", None), node.python_kernel_name or ""
        name = overload.name().partition(".")[0] if overload else kernel
        buffers = [buffer for buffer in node.inputs if hasattr(buffer, "get_size")]
        return name.replace("extern_kernels.", "aten::"), tuple(map(_shape, buffers))
    parts = list(scheduled.get_nodes())
    kind = "red" if scheduled.is_reduction() else "poi"
    touched = {
        dependency.name
        for part in parts
        for dependency in (*part.read_writes.reads, *part.read_writes.writes)
    }
    own = (lowering.graph_inputs.get(n) or lowering.try_get_buffer(n) for n in sorted(touched))
    shapes = tuple(_shape(buffer) for buffer in own if hasattr(buffer, "get_size"))
    return f"triton_{kind}_{get_fused_kernel_name(parts, 'original_aten')}_{number}", shapes


def _shape(buffer: Any) -> tuple[int, ...]:
    """Sizes of a buffer; none of several in one."""
    return tuple(int(size) for size in buffer.maybe_get_size() or ())


def _bytes(parts: Sequence[Any], outputs: set[str]) -> int:
    """Bytes that these move in one kernel: distinct elements read from outside, results written."""
    own = {name for part in parts for name in part.get_buffer_names()}
    reads: dict[str, dict[Any, int]] = {}
    for part in parts:
        gathered = _gathered(part)
        for dep in part.read_writes.reads:
            if dep.name not in own and not isinstance(dep, WeakDep):
                reads.setdefault(dep.name, {}).update(_places(dep, gathered.get(dep.name, {})))
    total = 0
    for name, places in reads.items():
        whole = int(V.graph.get_numel(name))
        total += min(sum(places.values()), whole) * V.graph.get_dtype(name).itemsize
    inside = {part.get_name() for part in parts}
    for part in parts:
        for buffer in part.get_outputs():
            name = buffer.get_name()
            users = {user.node.get_name() for user in buffer.users}
            if name in outputs or users - inside:
                total += int(V.graph.get_numel(name)) * V.graph.get_dtype(name).itemsize
    return total


def _places(dep: Any, gathered: Mapping[Any, int]) -> Mapping[Any, int]:
    """Elements by place of a buffer that a dependency reads; a gather reads the rows it touches."""
    if isinstance(dep, StarDep):
        return {None: int(V.graph.get_numel(dep.name))}
    if dep.is_indirect():
        return gathered
    symbols = dep.index.free_symbols
    sizes = [int(n) for v, n in zip(dep.var_names, dep.size, strict=True) if v in symbols]
    return {(dep.index, tuple(sizes)): math.prod(sizes)}


def _gathered(part: Any) -> dict[str, dict[Any, int]]:
    """By buffer, the distinct indirect reads of a loop body, and how many elements each touches.

    A dependency does not say: it forgets what the index it reads depends on.
    """
    body = getattr(part, "_body", None)
    found: dict[str, dict[Any, int]] = {}
    indirect: dict[str, tuple[Any, frozenset[Any]]] = {}
    known: dict[fx.Node, tuple[Any, frozenset[Any]]] = {}  # what a node computes, from which loops
    for block in (body.root_block, *body.subblocks.values()) if body is not None else ():
        for node in block.graph.nodes:
            inputs = [known[a] for a in node.args if isinstance(a, fx.Node)]
            loops = frozenset().union(*(loops for _, loops in inputs))
            terms = [known[a][0] if isinstance(a, fx.Node) else a for a in node.args]
            if node.target == "get_index":
                index = body.indexing_exprs[node.args[0]]
                through = sorted(s.name for s in index.free_symbols if s.name in indirect)
                terms = [index, *(indirect[name][0] for name in through)]
                loops = frozenset(s for s in index.free_symbols if s in body.var_ranges)
                loops = loops.union(*(indirect[name][1] for name in through))
                node.meta["indirect"] = bool(through)
            elif str(node.target).startswith("set_indirect"):
                indirect[str(node.target).removeprefix("set_")] = known[node.args[0]]
            known[node] = (hash((node.target, *map(str, terms))), loops)
            if node.target == "load" and node.args[2].meta.get("indirect"):
                elements = math.prod(int(body.var_ranges[loop]) for loop in known[node.args[2]][1])
                found.setdefault(node.args[1], {})[known[node.args[2]][0]] = elements
    return found
