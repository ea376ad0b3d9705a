"""The module tree of an estimate, with sums for each module, and ops in another precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from rooftrace._plain import Positive
from rooftrace.costmodels.estimates.estimates import Estimate
from rooftrace.costmodels.ops import MATRIX
from rooftrace.errors import RequestError, hint
from rooftrace.graph import Op, OpGraph, Ref, Tensor, pattern_of
from rooftrace.hardware.precisions import precision

# -- precision islands -----------------------------------------------------------------------------
# Tensors in another floating precision than the one that the step is priced in.  `reprice` changes
# only tensors in the model's precision; an explicit cast to fp32 (a norm, a router, logits for the
# loss) stays.


@dataclass(frozen=True, slots=True)
class Island:
    """Tensors of one precision made (or held) by one module pattern: how many, and their bytes."""

    precision: str
    where: str
    tensors: Positive
    bytes: int


def islands(graph: OpGraph) -> tuple[Island, ...]:
    """Islands of a graph, most bytes first, without tensors of the optimizer."""
    expected = {graph.model.get("priced_dtype") or graph.model.get("dtype")}
    expected |= {graph.workload.get(name) for name in ("weights_dtype", "kv_dtype")}
    counts: dict[tuple[str, str], list[int]] = {}
    for where, tensor in _owners(graph):
        if tensor.dtype in {*expected, tensor.stored} or precision(tensor.dtype).kind != "float":
            continue
        entry = counts.setdefault((tensor.dtype, pattern_of(where)), [0, 0])
        entry[0] += graph.times(tensor)
        entry[1] += graph.times(tensor) * tensor.nbytes
    made = (Island(name, where, *count) for (name, where), count in counts.items())
    return tuple(sorted(made, key=lambda i: (-i.bytes, i.where, i.precision)))


def _owners(graph: OpGraph) -> Iterator[tuple[str, Tensor]]:
    """(module path, tensor) of every storage that is not the optimizer's."""
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.storage == index and tensor.role != "optimizer":
            yield tensor.name.rpartition(".")[0], tensor
    for op in graph.ops:
        if op.part == "optimizer":
            continue
        for index in op.outputs:
            if graph.values[index].storage == index:
                yield op.module, graph.values[index]


# -- moduletree ------------------------------------------------------------------------------------
# Sums of a module include the modules inside it.  Equal siblings stand once, with a count.

T = TypeVar("T")
COLUMNS = (
    "input_size", "output_size", "num_params", "params_percent", "kernel_size", "mult_adds",
    "trainable", "flops", "bytes", "time",
)  # fmt: skip
"""Columns of a module: torchinfo's names, and three more."""
USUAL = ("input_size", "output_size", "num_params", "mult_adds")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of weights that are no parameters, where the module is not at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module, or `count` modules that are alike.  Numbers are sums over all of them."""

    name: str  # in the module around it; of several "0-31"
    path: str  # of the first of them
    kind: str  # name of its class
    depth: int  # 0: the root
    count: int = 1
    input: Tensor | None = None  # the first activation that the module reads; None: unknown
    output: Tensor | None = None  # the last one that it makes for others
    kernel_size: tuple[int, ...] | None = None  # of a convolution or pooling
    params: int = 0  # numbers in parameters, those of the modules inside included
    trainable: int | None = None  # how many of them require a gradient; None: unknown
    macs: int = 0  # multiply-adds in matrix products and convolutions
    flops: int = 0  # FLOP, a multiply-add as 2, with vector work
    bytes: int = 0  # through HBM
    seconds: float = 0.0  # of its kernels, one after another
    children: tuple[ModuleNode, ...] = ()

    def walk(self, depth: int | None = None) -> Iterator[ModuleNode]:
        """This node and those below it, parents first; down to a depth (None: all)."""
        yield self
        for child in self.children if depth is None or self.depth < depth else ():
            yield from child.walk(depth)


@dataclass(frozen=True, kw_only=True, repr=False)
class Summary(Estimate):
    """An estimate that prints as a tree of modules; its `estimate` prints as a table."""

    tree: ModuleNode
    depth: int = 3  # how far down the tree is printed
    col_names: tuple[str, ...] = ()  # printed columns

    @property
    def estimate(self) -> Estimate:
        """The estimate alone."""
        return Estimate(**{field.name: getattr(self, field.name) for field in fields(Estimate)})

    @property
    def total_params(self) -> int:
        """Numbers in all parameters; one that several modules share counts once."""
        return int(self.graph.model.get("params") or self.tree.params)

    @property
    def trainable_params(self) -> int | None:
        """Numbers in parameters that require a gradient; None if unknown."""
        count = self.graph.model.get("params_trainable", self.tree.trainable)
        return None if count is None else int(count)

    @property
    def total_mult_adds(self) -> int:
        """Multiply-adds in matrix products and convolutions: `macs`."""
        return self.macs


def check_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Names of columns, as a tuple.  Raises RequestError for one that there is not."""
    if isinstance(names, str):
        raise RequestError(f"col_names={names!r}: expected several, for example ({names!r},)")
    for name in names:
        if name not in COLUMNS:
            raise RequestError(
                f"col_names: no column {name!r}{hint(str(name), COLUMNS)}; there are "
                f"{', '.join(COLUMNS)}"
            )
    return tuple(names)


def module_tree(
    estimate: Estimate, gradients: Mapping[str, bool] | None = None, *, fold: bool = True
) -> ModuleNode:
    """The root of the tree of modules.

    gradients: whether each parameter asks for a gradient, by name; None where only the graph is at
    hand.  fold: siblings with numbers for names that are alike stand once.
    """
    graph = estimate.plan.source
    shapes, sums = _Shapes(graph), _sums(estimate)
    params = _parameters(graph, gradients)
    for path, (count, trainable) in params.items():
        for parent in around(path):
            sums[parent].params += count
            sums[parent].trainable += trainable
    all_trainable = graph.model.get("params_trainable") == graph.model.get("params")
    for path in [*graph.modules, *sums]:
        for parent in around(path):
            sums.setdefault(parent, _ModuleSums())
    order = {path: index for index, path in enumerate(graph.modules)}
    below: dict[str, list[str]] = defaultdict(list)
    for path in sorted(sums, key=lambda path: (order.get(path, len(order)), path)):
        if path:
            below[path.rpartition(".")[0]].append(path)

    def node(path: str, depth: int) -> ModuleNode:
        entry: dict[str, Any] = asdict(sums[path])
        if gradients is None and not all_trainable:
            entry["trainable"] = None
        children = [node(child, depth + 1) for child in below.get(path, ())]
        return ModuleNode(
            name=path.rpartition(".")[2],
            path=path,
            kind=graph.modules.get(path, "" if path else str(graph.model.get("name") or "")),
            depth=depth,
            input=shapes.inputs.get(path),
            output=shapes.outputs.get(path),
            kernel_size=shapes.windows.get(path),
            children=tuple(_folded(children) if fold else children),
            **entry,
        )

    return node("", 0)


# -- alike siblings --------------------------------------------------------------------------------


def _folded(nodes: Sequence[ModuleNode]) -> list[ModuleNode]:
    """Nodes in order; those with numbers for names that are alike are one, at the first's place."""
    groups: dict[object, list[ModuleNode]] = {}
    for node in nodes:
        key = _likeness(node) if node.name.isdigit() else node.path
        groups.setdefault(key, []).append(node)
    return [_together(group) for group in groups.values()]


def _likeness(node: ModuleNode) -> object:
    inside = tuple((child.name, _likeness(child)) for child in node.children)
    shape = (_shape(node.input), _shape(node.output), node.kernel_size)
    return (
        node.kind,
        node.count,
        shape,
        node.params,
        node.trainable,
        node.macs,
        node.flops,
        inside,
    )


def _shape(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tensor.shape)


def _together(nodes: Sequence[ModuleNode]) -> ModuleNode:
    """The node that stands for several that are alike."""
    first = nodes[0]
    if len(nodes) == 1:
        return first
    name = _ranges([int(node.name) for node in nodes]) if first.name.isdigit() else first.name
    inside = zip(*(node.children for node in nodes), strict=True)
    names = ["count", *(each.name for each in fields(_ModuleSums))]
    if first.trainable is None:
        names.remove("trainable")
    sums: dict[str, Any] = {n: sum(getattr(node, n) for node in nodes) for n in names}
    # A child of several parents that are alike has the name that it has in each.
    children = tuple(replace(_together(group), name=group[0].name) for group in inside)
    return replace(first, name=name, children=children, **sums)


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-2,5": consecutive numbers as a range; "..." after the third range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    return ",".join([*texts[:3], *(["..."] if len(texts) > 3 else [])])


# -- sums ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ModuleSums:
    params: int = 0
    trainable: int = 0
    macs: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0


def around(path: str) -> list[str]:
    """A path and those of all modules around it, the root last."""
    paths = [path]
    while path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return paths


def _sums(estimate: Estimate) -> defaultdict[str, _ModuleSums]:
    """FLOP, bytes and seconds by module path, the modules inside included."""
    sums: defaultdict[str, _ModuleSums] = defaultdict(_ModuleSums)
    graph, costs = estimate.graph, estimate.plan.op_costs
    for index, op in enumerate(graph.ops):
        cost, paths = costs[index], _paths(graph, op)
        times = graph.times(op)
        flops, macs = times * cost.flops(), times * cost.flops(MATRIX) // 2
        for path in paths if flops else ():
            for parent in around(path):
                sums[parent].flops += flops // len(paths)
                sums[parent].macs += macs // len(paths)
    for row in estimate.rows:
        for path in row.modules:
            for parent in around(path):
                sums[parent].bytes += row.bytes // len(row.modules)
                sums[parent].seconds += row.timing.t_device / len(row.modules)
    return sums


def _paths(graph: OpGraph, op: Op, path: str | None = None) -> tuple[str, ...]:
    """The module paths in which an op stands, over the iterations of its repeats.

    path: of a module around the op, in place of that of the op.
    """
    paths = [op.module if path is None else path]
    for number in op.repeats:
        repeat = graph.repeats[number]
        if repeat.container is not None:
            paths = [repeat.path(path, q) for path in paths for q in range(repeat.count)]
    return tuple(dict.fromkeys(paths))


def _parameters(
    graph: OpGraph, gradients: Mapping[str, bool] | None
) -> Mapping[str, tuple[int, int]]:
    """Numbers in the parameters of each module, and in the trainable ones."""
    everything = graph.model.get("params_trainable") == graph.model.get("params")
    counts: dict[str, tuple[int, int]] = {}
    for index in graph.external:
        value = graph.values[index]
        if value.role != "weights" or value.storage != index or not value.name:
            continue
        for name in _names(graph, index):
            path, _, last = name.rpartition(".")
            is_buffer = last in _BUFFERS if gradients is None else name not in gradients
            if is_buffer:
                continue
            trains = everything if gradients is None else gradients[name]
            count, trainable = counts.get(path, (0, 0))
            counts[path] = count + value.elements, trainable + value.elements * trains
    return counts


def _names(graph: OpGraph, index: int) -> Iterable[str]:
    """The names of a value, one for each iteration of the repeats that it is in."""
    value = graph.values[index]
    names = [value.name]
    for number in value.repeats:
        repeat = graph.repeats[number]
        if index in repeat.names:
            names = list(repeat.names[index])
        else:
            names = [repeat.path(name, q) for name in names for q in range(repeat.count)]
    return dict.fromkeys(names)


# -- shapes ----------------------------------------------------------------------------------------


class _Shapes:
    """Inputs and outputs of each module, by its path, from the dataflow of forward ops."""

    def __init__(self, graph: OpGraph) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.windows: dict[str, tuple[int, ...]] = {}  # of convolutions and poolings
        self._graph = graph
        self._forward = [op for op in graph.ops if op.part == "forward"]
        self._makers = {value: op.module for op in self._forward for value in op.outputs}
        self._readers = self._by_value()
        last: dict[str, int] = {}
        for op in self._forward:
            paths = around(op.module)
            for value in op.inputs:
                self._read(op, value, paths)
            for value in op.outputs[:1]:
                last.update((path, value) for path in paths)
            for value in op.outputs:
                self._made(op, value, paths)
            window = _window(graph, op)
            if window is not None:
                self._put(self.windows, op, op.module, window)
        for op in self._forward:
            for path in around(op.module):
                if path not in self.outputs and path in last:
                    self._put(self.outputs, op, path, graph.values[last[path]])

    def _by_value(self) -> dict[int, set[str]]:
        """The modules whose ops read each value; the next iteration of a repeat is another."""
        readers: dict[int, set[str]] = defaultdict(set)
        for op in self._forward:
            for value in op.inputs:
                readers[value].add(op.module)
            for ref in op.reads:
                if ref.then is not None:
                    repeat = self._graph.repeats[ref.then.repeat]
                    readers[ref.then.value].add(repeat.container or "")
        for value in self._graph.outputs:
            readers[value].add("(outside)")
        return readers

    def _read(self, op: Op, value: int, paths: Sequence[str]) -> None:
        tensor = self._graph.values[value]
        if tensor.role != "activations":
            return
        maker = self._makers.get(value)
        for path in paths:
            if path not in self.inputs and (maker is None or not _inside(maker, path)):
                self._put(self.inputs, op, path, tensor)

    def _made(self, op: Op, value: int, paths: Sequence[str]) -> None:
        tensor = self._graph.values[value]
        if tensor.role not in ("activations", "temporary"):
            return
        for path in paths:
            if any(not _inside(reader, path) for reader in self._readers[value]):
                self._put(self.outputs, op, path, tensor)

    def _put(self, values: dict[str, T], op: Op, path: str, value: T) -> None:
        """Set a value of the module at `path`, and of those of the other iterations."""
        for each in _paths(self._graph, op, path):
            values[each] = value


def _inside(path: str, parent: str) -> bool:
    if not parent:
        return path != "(outside)"
    return path == parent or path.startswith(f"{parent}.")


def _window(graph: OpGraph, op: Op) -> tuple[int, ...] | None:
    """The window of a convolution or pooling."""
    weight = op.arguments.get("weight")
    if "convolution" in op.name and isinstance(weight, Ref):
        return graph.values[weight.id].shape[2:]
    size = op.arguments.get("kernel_size")
    if isinstance(size, tuple) and all(isinstance(n, int) for n in size):
        return tuple(int(n) for n in size if isinstance(n, int))
    return None
