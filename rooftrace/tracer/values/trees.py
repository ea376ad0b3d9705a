"""Helpers for tensors: dtype names, subclasses, tensors in nested values, and owning modules."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from types import CellType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rooftrace.graph import GraphError
from rooftrace.hardware.precisions import PrecisionError, precision
from rooftrace.tracer import torch_private

_PREFERRED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Of several dtypes with one name, the name means these."""


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype ("bf16"); one without a name is so many bits of integer."""
    try:
        return precision(str(dtype)).name
    except PrecisionError:
        return f"uint{8 * dtype.itemsize}"


@functools.cache
def _by_name() -> dict[str, torch.dtype]:
    every = {item for item in vars(torch).values() if isinstance(item, torch.dtype)}
    named = [d for d in every if not str(d).startswith(("torch.q", "torch.bits"))]
    ordered = sorted(named, key=lambda dtype: (dtype in _PREFERRED, str(dtype)))
    return {**{dtype_name(dtype): dtype for dtype in ordered}, "fp8": torch.float8_e4m3fn}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of our names, or of torch's.

    Raises GraphError for a name that no dtype has (nvfp4, or a misspelling).
    """
    try:
        return _by_name()[precision(name).name]
    except (KeyError, PrecisionError):
        names = ", ".join(sorted(_by_name()))
        raise GraphError(f"{name!r} has no torch dtype; these have: {names}") from None


# -- subclasses ------------------------------------------------------------------------------------
# Tensor subclasses: the tensors that hold their bytes, and attributes that the user set.

OURS = "_rooftrace"
"""The prefix of the attributes that the tracer sets on tensors."""
HAS_BYTES = f"{OURS}_has_bytes"
"""Attribute of a meta tensor subclass that stands for one with bytes besides inner tensors."""
ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
"""Classes of plain tensors, which hold their bytes and nothing else."""


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class handle ops themselves (DTensor, nested, quantized).

    Fake tensors do not: a mode that comes before ours does it for them.
    """
    if issubclass(kind, torch_private.FakeTensor):
        return False
    handles = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    return handles or hasattr(kind, "__tensor_flatten__")


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that a user's code has set on a tensor, in its `__dict__` or its slots."""
    attributes = {name: item for name, item in vars(tensor).items() if not name.startswith(OURS)}
    for kind in type(tensor).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(tensor, name):
                attributes.setdefault(name, getattr(tensor, name))
    return attributes


def is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no bytes: `_make_wrapper_subclass` made it."""
    if type(tensor) in ORDINARY or not is_wrapper(type(tensor)):
        return False
    if tensor.layout is not torch.strided:
        return True
    if tensor.device.type == "meta":  # it has no address there: its attributes tell
        return not vars(tensor).get(HAS_BYTES) and bool(tensors_in(attributes_of(tensor)))
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def parts_of(tensor: Tensor, attributes: bool = True) -> list[tuple[Tensor, str]]:
    """The plain tensors that hold the bytes of a tensor, each with a suffix for its name.

    attributes: also tensors among the attributes of a subclass that has bytes itself (scales of
    packed weights).
    """
    tensor = unwrapped(tensor)
    kind = type(tensor)
    if kind in ORDINARY:
        return named_pieces(tensor)
    plain: list[tuple[Tensor, str]] = []
    if hasattr(kind, "__tensor_flatten__"):
        flat: Any = tensor
        inside = [(name, getattr(tensor, name)) for name in flat.__tensor_flatten__()[0]]
        named = [(name, part) for name, part in inside if isinstance(part, Tensor)]
    else:
        if not is_hollow(tensor):
            plain = [(tensor, "")]
            if not attributes:
                return plain
        named = [
            (name, part)
            for name, item in attributes_of(tensor).items()
            for part in tensors_in(item)
            if part is not tensor
        ]
    alone = len(named) + len(plain) == 1
    for name, inner in named:
        parts = [(inner, "")] if inner is tensor else parts_of(inner)
        plain += [(part, ("" if alone else f".{name}") + suffix) for part, suffix in parts]
    return plain or [(tensor, "")]


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that store these tensors: for a wrapper the tensors inside; views of one count once."""
    total = 0
    for tensor in tensors:
        parts = {bytes_of(part): part for part, _ in reversed(parts_of(tensor))}
        total += sum(part.numel() * part.element_size() for part in parts.values())
    return total


# -- trees -----------------------------------------------------------------------------------------
# Tensors in nested Python values (containers, dataclasses, cache objects), and their look.

PLAIN: tuple[type, ...] = (
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types of values that hold nothing else and never change."""
_SPARSE = frozenset(
    {
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    }
)
_DEPTH = 6
"""Levels of objects inside objects that are searched."""


def tensors_in(tree: Any, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors reachable in `tree`, each once, in the order they are met.

    seen: identities of objects that are not searched; the objects met here are added.
    """
    tensors: list[Tensor] = []
    depths: dict[int, int] = {}
    _search(tree, _DEPTH, frozenset() if seen is None else seen, depths, tensors)
    if seen is not None:
        seen.update(depths)
    return tensors


def _search(
    tree: Any,
    depth: int,
    seen: Collection[int],
    depths: dict[int, int],
    tensors: list[Tensor],
) -> None:
    """Append the tensors at most `depth` steps below.

    depths: how deep each object was searched already: one that was first met far down is searched
    again where it is nearer.
    """
    if tree is None or isinstance(tree, (str, bytes, int, float, nn.Module, type, ModuleType)):
        return
    if id(tree) in seen or depths.get(id(tree), -1) >= depth:
        return
    new = id(tree) not in depths
    depths[id(tree)] = depth
    if isinstance(tree, Tensor):
        if new:
            tensors.append(tree)
    elif depth:
        for item in held_in(tree):
            _search(item, depth - 1, seen, depths, tensors)


def held_in(item: Any) -> Iterable[Any]:
    """The contents of an object: a container's items, else its attributes; none for a callable.

    A dict gives its values.  Any other mapping may load items on access, so it gives its
    attributes.
    """
    if isinstance(item, (dict, MappingProxyType)):
        return item.values()
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if callable(item):
        return ()
    slots = (getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return (*vars(item).values(), *slots) if hasattr(item, "__dict__") else tuple(slots)


ABSENT: object = object()
"""The value of a variable that has no value yet."""


def cell_content(cell: CellType) -> Any:
    """The value of a variable that functions share (a cell of a closure), or ABSENT."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def arguments_in(items: Iterable[Any], tensors: list[Tensor]) -> None:
    """Append the tensors among an op's arguments (lists and tuples only) to `tensors`."""
    for item in items:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, (list, tuple)):
            arguments_in(item, tensors)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor under the wrappers of torch.func's transforms; ops are recorded on that."""
    while torch_private.is_functorch_wrapped_tensor(tensor):
        tensor = torch_private.get_unwrapped(tensor)
    return tensor


def on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on meta, also where a script is shown it on a GPU."""
    with torch_private.DisableTorchFunction():
        return tensor.device.type == "meta"


def bytes_of(tensor: Tensor) -> int:
    """Identity of the bytes of a tensor while it lives: the same for all its views."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def look_of(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides (for a sparse tensor its layout) and precision."""
    strided = tensor.layout is torch.strided
    return tuple(tensor.shape), tensor.stride() if strided else tensor.layout, tensor.dtype


def label_of(tensor: Tensor) -> str:
    """Precision and shape in words for a message: "float32[8, 16]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor stores only some of its elements."""
    return tensor.layout is not torch.strided and tensor.layout in _SPARSE


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that store a tensor: itself, or its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


STORES_NOTHING = "_rooftrace_stores_nothing"
"""Attribute of a sparse tensor on meta that surely stores no element."""
_PIECES = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Names of the pieces of a sparse tensor, in the order of `pieces_of`."""


def named_pieces(tensor: Tensor) -> list[tuple[Tensor, str]]:
    """The pieces of a tensor, each with a suffix for its name; of a sparse one the values first.

    A sparse one that stores nothing on meta stands for itself, unless it was emptied: it was made
    by an op that cannot count there its stored elements.
    """
    if not is_sparse(tensor):
        return [(tensor, "")]
    if tensor.is_meta and not tensor._nnz() and STORES_NOTHING not in vars(tensor):
        return [(tensor, "")]
    names = [f".{name}" for name in _PIECES[tensor.layout]]
    with torch_private.AutoDispatchBelowAutograd():
        return list(zip(pieces_of(tensor), names, strict=True))[::-1]


def listed(item: Any) -> list[Tensor]:
    """The tensors of one argument: itself, or the tensors of a list."""
    tensors: list[Tensor] = []
    arguments_in((item,), tensors)
    return tensors


# -- owners ----------------------------------------------------------------------------------------
# Modules: the tensors that they own, the parameters of their forward, and their paths.

LAZY = (UninitializedParameter, UninitializedBuffer)
"""Classes of tensors that have no shape before their module is called the first time."""


def attribute(item: Any, name: str, default: Any = None) -> Any:
    """An attribute of a user's object, or the default where it has none or raises."""
    try:
        return getattr(item, name, default)
    except Exception:  # of the user's __getattr__
        return default


def class_name(module: nn.Module) -> str:
    """The class name of a module; for TorchScript, of its original."""
    made_of = module.original_name if isinstance(module, torch.jit.ScriptModule) else ""
    return str(made_of or type(module).__name__)


_COMMON = frozenset({bool, int, str, type(None), dict, OrderedDict, set})
"""Types of most attributes of modules, none of them a tensor: a look-up takes half of the time."""


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers and plain tensor attributes of one module, without its children's."""
    tensors: list[Tensor] = [t for t in module._parameters.values() if t is not None]
    tensors += [t for t in module._buffers.values() if t is not None]
    others = vars(module).values()
    return tensors + [x for x in others if type(x) not in _COMMON and isinstance(x, Tensor)]


def modules_in(root: nn.Module) -> list[nn.Module]:
    """A module and all inside, each once, in the order of `Module.modules`, which passes each
    through a generator for each module that it is in."""
    modules: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules[module] = None
            if inside := module._modules:
                waiting += [part for part in reversed(inside.values()) if part is not None]
    return list(modules)


def paths_in(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module and all inside by every dotted path, in the order of `Module.named_modules`, which
    passes each through a generator for each module that it is in."""
    named: list[tuple[str, nn.Module]] = []
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        named.append((path, module))
        if inside := module._modules:
            before = f"{path}." if path else ""
            parts = reversed(inside.items())
            waiting += [(before + name, part) for name, part in parts if part is not None]
    return named


def tensors_of(root: nn.Module) -> list[Tensor]:
    """The tensors of a module and of all inside, those of several as often."""
    return [tensor for module in modules_in(root) for tensor in own_tensors(module)]


def weights_in(root: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a module and its children, also where its attributes hide the
    methods that list them."""
    return chain(nn.Module.parameters(root), nn.Module.buffers(root))


def held_tensors(module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors in objects that a module holds, with the names of its attributes.

    seen: objects that are not looked into (again).
    """
    seen = set() if seen is None else seen
    for name, item in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules") and not isinstance(item, PLAIN):
            yield from ((name, tensor) for tensor in tensors_in(item, seen))


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, by name; for TorchScript from its schema."""
    forward: Any = module.forward
    if not isinstance(module, torch.jit.ScriptModule):
        return inspect.signature(forward).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [argument.name for argument in forward.schema.arguments[1:]]
    return {name: inspect.Parameter(name, kind) for name in names}


def is_lazy(module: nn.Module) -> bool:
    """Whether some parameter has no shape before the first call (nn.LazyLinear)."""
    return any(isinstance(tensor, LAZY) for tensor in tensors_of(module))


def shown_path(path: str) -> str:
    """A module path without the steps that torch.compile adds."""
    if "_orig_mod" not in path:
        return path
    return ".".join(step for step in path.split(".") if step != "_orig_mod")
