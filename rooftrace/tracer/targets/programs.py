"""A program in a file as a module on meta, with inputs of the requested sizes.

Which sizes may change is in the file: a dimension is fixed, or it has a name and a range there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from rooftrace._reading import FileKind
from rooftrace.errors import RequestError, TargetError, hint
from rooftrace.tracer.callables import named_class, program_module
from rooftrace.tracer.targets import onnxops
from rooftrace.tracer.targets.ptfile import Dimensions, ProgramInput
from rooftrace.tracer.torch_private import tree_unflatten

if TYPE_CHECKING:
    from rooftrace.tracer import Request


def load_program(
    target: str, request: Request
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module of a file of torch.export.save or of ONNX, and arguments for a call of it.

    Raises TargetError for a file that is not read, and RequestError for sizes that it does not
    take, or whose dimensions nothing says.
    """
    for option in ("mesh", "settings", "kv", "schedule", "interleave", "microbatches"):
        if value := getattr(request, option):
            raise RequestError(
                f"--{option} {value}: {target} is a program, whose graph is fixed; leave it out"
            )
    if request.checkpoint != "none":
        raise RequestError(
            f"--checkpoint {request.checkpoint}: {target} is a program; leave it out"
        )
    path = Path(target)
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no such file")
    if path.suffix == ".onnx":
        module, entries, dimensions = read_onnx(path)
        module.__class__ = named_class(type(module), path.stem)
        return module, tuple(tensors_of(target, entries, dimensions, request)), {}

    from rooftrace.tracer.targets.ptfile import read_program

    program = read_program(path)
    entries, others, dimensions = _entries(program)
    made = iter(tensors_of(target, entries, dimensions, request))
    flat = [next(made) if other is None else other[0] for other in others]
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
    return program_module(program), tuple(args), dict(kwargs)


def _entries(program: Any) -> tuple[list[ProgramInput], list[tuple[Any] | None], Dimensions]:
    """The tensors among a program's inputs; for each input None, or the value of a constant."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    entries: list[ProgramInput] = []
    others: list[tuple[Any] | None] = []
    usual: dict[str, int | None] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind.name != "USER_INPUT":
            continue
        value = nodes[spec.arg.name].meta.get("val") if spec.arg.name in nodes else None
        if not isinstance(value, Tensor):
            others.append((getattr(spec.arg, "value", value),))
            continue
        others.append(None)
        sizes: list[int | str] = []
        for size in value.shape:
            symbolic: Any = size  # an int for the type checker, a SymInt where it may change
            if type(symbolic) is int:
                sizes.append(symbolic)
                continue
            sizes.append(name := str(symbolic.node.expr))
            hinted = symbolic.node.hint
            usual[name] = int(hinted) if hinted is not None else None
        entries.append(ProgramInput(spec.arg.name, tuple(sizes), value.dtype))
    ranges = {}
    for symbol, span in program.range_constraints.items():
        top = int(span.upper) if span.upper.is_Integer else 1 << 62
        ranges[str(symbol)] = (int(span.lower) if span.lower.is_Integer else 0, top)
    return entries, others, Dimensions(usual, ranges)


def tensors_of(
    target: str, entries: Sequence[ProgramInput], dimensions: Dimensions, request: Request
) -> list[Tensor]:
    """The inputs on meta at the sizes of a request.  Raises RequestError."""
    from rooftrace.tracer.inputs import calls

    described = _described(target, entries, request.inputs)
    chosen: dict[str, int] = {}
    for entry in entries:
        if entry.name in described:
            _take(target, entry, described[entry.name][0], chosen)
    for option, place in (("batch", 0), ("seq", 1)):
        size = getattr(request, option)
        if size is not None:
            _resize(target, entries, option, place, size, chosen)
    sizes = {**dimensions.usual, **chosen}
    for entry in entries:
        for size in entry.sizes:
            if isinstance(size, str) and sizes.get(size) is None:
                raise RequestError(
                    f"{target}: nothing says how large {size} of {entry} is; say it with --batch, "
                    f"--seq, or --input {entry.name}=SHAPE:DTYPE"
                )
    for name, size in chosen.items():
        low, high = dimensions.ranges.get(name, (0, 1 << 62))
        if not low <= size <= high:
            where = next(entry for entry in entries if name in entry.sizes)
            most = f" to {high:,}" if high < 1 << 62 else " or more"
            raise RequestError(f"{target}: {name} of {where} is {size:,}; it takes {low:,}{most}")
    return [
        calls.made_input(
            tuple(size if isinstance(size, int) else int(sizes[size] or 0) for size in entry.sizes),
            described[entry.name][1] if entry.name in described else entry.dtype,
        )
        for entry in entries
    ]


def _described(
    target: str, entries: Sequence[ProgramInput], texts: Mapping[str, str]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of --input.  Raises RequestError for a name or a text that is none."""
    from rooftrace.tracer.inputs import calls

    inputs = [entry.name for entry in entries]
    for name in texts:
        if name not in inputs:
            shown = ", ".join(map(str, entries))
            raise RequestError(f"--input {name}: {target} takes {shown}{hint(name, inputs)}")
    return {n: (tuple(t.shape), t.dtype) for n, t in calls.parsed_inputs(texts).items()}


def _take(target: str, entry: ProgramInput, shape: Sequence[int], chosen: dict[str, int]) -> None:
    """The sizes of dimensions that a shape sets."""
    fits = len(shape) == len(entry.sizes) and all(
        size == wanted if isinstance(size, int) else chosen.setdefault(size, wanted) == wanted
        for size, wanted in zip(entry.sizes, shape, strict=False)
    )
    if not fits:
        raise RequestError(
            f"--input {entry.name}={','.join(map(str, shape))}: {target} takes {entry}; numbers "
            "are fixed in it"
        )


def _resize(
    target: str,
    entries: Sequence[ProgramInput],
    option: str,
    position: int,
    size: int,
    chosen: dict[str, int],
) -> None:
    """Set the size of the first inputs' dimension in a place."""
    entry = next((entry for entry in entries if len(entry.sizes) > position), None)
    old = entry.sizes[position] if entry is not None else None
    if isinstance(old, str):
        if chosen.setdefault(old, size) != size:
            raise RequestError(f"--{option} {size}: an --input makes it {chosen[old]}")
    elif old != size:
        shown = ", ".join(map(str, entries)) or "no tensors"
        raise RequestError(
            f"--{option} {size}: {target} takes {shown}, in which dimension {position} is fixed; "
            "export it with a dynamic dimension"
        )


# -- ONNX ------------------------------------------------------------------------------------------
# A model in ONNX as data: its graph and the sizes of its weights; no file beside it is opened.

KIND = FileKind("ONNX model", TargetError)
_MOST_BYTES = 1 << 31
"""Bytes of a file: the limit of the format."""
_MOST_KNOWN = 1 << 22
"""Whole numbers whose values are read."""
_MOST_FLOATS = 1
"""Floating-point numbers whose values are read: a constant of a formula, no weights."""
_DTYPES: Mapping[str, torch.dtype] = {
    "FLOAT": torch.float32, "DOUBLE": torch.float64, "FLOAT16": torch.float16,
    "BFLOAT16": torch.bfloat16, "INT64": torch.int64, "INT32": torch.int32, "INT16": torch.int16,
    "INT8": torch.int8, "UINT8": torch.uint8, "BOOL": torch.bool,
    "FLOAT8E4M3FN": torch.float8_e4m3fn, "FLOAT8E5M2": torch.float8_e5m2,
}  # fmt: skip


def read_onnx(path: Path) -> tuple[nn.Module, list[ProgramInput], Dimensions]:
    """The module of an ONNX file, its inputs, and which of their dimensions may change.

    Raises OSError, and TargetError where `onnx` is not installed, for another or a damaged file,
    and for ops that are not read, which it names.
    """
    try:
        import onnx
    except ImportError:
        raise TargetError(
            f"{path}: ONNX needs the package onnx: pip install 'rooftrace[onnx]'"
        ) from None
    where = str(path)
    if path.stat().st_size > _MOST_BYTES:
        raise KIND.unreadable(where, f"it has more than {_MOST_BYTES >> 30} GiB")
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except Exception as problem:  # whatever the parser says of another file
        raise KIND.unreadable(where, problem) from None
    if not model.graph.node:
        raise KIND.unreadable(where, "it has no graph")
    _check(model, where)
    try:
        return _module(model, where)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as problem:
        if isinstance(problem, TargetError):
            raise
        raise KIND.unreadable(where, f"its graph does not hold together: {problem!r}") from None


def _check(model: Any, where: str) -> None:
    """Raise TargetError for ops that are not read."""
    functions = {function.name for function in model.functions}
    known = {*onnxops.OPS, *onnxops.NUMBER_OPS, "Constant"}
    unknown = Counter(
        f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for node in model.graph.node
        if node.op_type not in known
        or node.domain not in ("", "ai.onnx")
        or node.op_type in functions
    )
    if unknown:
        named = ", ".join(f"{name} x{count}" for name, count in sorted(unknown.items())[:12])
        raise KIND.refused(where, f"ops that are not read: {named}; export it as .pt2 instead")


def _module(model: Any, where: str) -> tuple[nn.Module, list[ProgramInput], Dimensions]:
    graph = model.graph
    held = {tensor.name: _initializer(tensor, where) for tensor in graph.initializer}
    usual: dict[str, int | None] = {}
    entries = [_entry(value, usual, where) for value in graph.input if value.name not in held]
    steps = tuple(
        OnnxStep(
            op=node.op_type,
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            attributes={item.name: _attribute(item, where) for item in node.attribute},
        )
        for node in graph.node
    )
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
    module = OnnxModule(
        steps, held, [e.name for e in entries], [o.name for o in graph.output], opset
    )
    ranges = {name: (1, 1 << 62) for name in usual}
    return module, entries, Dimensions(usual, ranges)


def _dtype(number: int, where: str) -> torch.dtype:
    import onnx

    names = {value: name for name, value in onnx.TensorProto.DataType.items()}
    name = names.get(number, str(number))
    if name not in _DTYPES:
        raise KIND.refused(where, f"tensors of {name} are not read")
    return _DTYPES[name]


def _initializer(tensor: Any, where: str) -> Initializer:
    """A tensor of the file: its sizes, and its values where it is small and in the file itself."""
    shape = tuple(int(size) for size in tensor.dims)
    if any(size < 0 for size in shape) or math.prod(shape) >= 1 << 62:
        raise KIND.unreadable(where, f"{tensor.name!r:.80} has the sizes {shape}")
    dtype = _dtype(tensor.data_type, where)
    most = _MOST_FLOATS if dtype.is_floating_point else _MOST_KNOWN
    values = None
    if math.prod(shape) <= most and not tensor.external_data:
        values = _values(tensor, where)
    return Initializer(shape, dtype, values)


def _values(tensor: Any, where: str) -> numpy.ndarray[Any, Any] | None:
    from onnx import numpy_helper

    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as problem:
        raise KIND.unreadable(where, f"{tensor.name!r:.80}: {problem}") from None
    return array if array.dtype.kind in "fiub" else array.astype(numpy.float32)


def _entry(value: Any, usual: dict[str, int | None], where: str) -> ProgramInput:
    kind = value.type.tensor_type
    if value.type.WhichOneof("value") != "tensor_type":
        raise KIND.refused(where, f"the input {value.name!r:.80} is no tensor")
    sizes: list[int | str] = []
    for axis, size in enumerate(kind.shape.dim):
        if size.WhichOneof("value") == "dim_value":
            sizes.append(int(size.dim_value))
        else:
            name = size.dim_param or f"{value.name}_{axis}"
            usual[name] = None
            sizes.append(name)
    return ProgramInput(value.name, tuple(sizes), _dtype(kind.elem_type, where))


def _attribute(attribute: Any, where: str) -> Any:
    import onnx

    kinds = onnx.AttributeProto
    if attribute.type in (kinds.GRAPH, kinds.GRAPHS):
        raise KIND.refused(where, f"a graph inside of a node ({attribute.name}) is not read")
    if attribute.type == kinds.TENSOR:
        made = _initializer(attribute.t, where)
        return made
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


# -- onnxmodule ------------------------------------------------------------------------------------
# A graph of ONNX as a module: each step a call of torch.
#
# Inputs of shape computations stay in numpy, as a runtime that folds constants has them: they are
# constants while the module runs, and no work of the step.


@dataclass(frozen=True, slots=True)
class Initializer:
    """A tensor of the file.  values: of a small one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: numpy.ndarray[Any, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxStep:
    """A node of the graph; names of values, "" for an input that is left out."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


class OnnxModule(nn.Module):
    """Runs the steps of an ONNX graph in their order."""

    def __init__(
        self,
        steps: Sequence[OnnxStep],
        held: Mapping[str, Initializer],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
    ) -> None:
        super().__init__()
        self.steps, self.inputs, self.outputs, self.opset = steps, inputs, outputs, opset
        self.constants: dict[str, Any] = {}
        self.weights: dict[str, str] = {}
        for number, (name, item) in enumerate(held.items()):
            if item.values is not None:
                self.constants[name] = item.values
                continue
            self.weights[name] = self._hold(f"weight_{number}", item)
        for step in steps:
            if step.op == "Constant":
                self._constant(step)
        last = {name: place for place, step in enumerate(steps) for name in step.inputs}
        self.last = {name: place for name, place in last.items() if name not in outputs}

    def _hold(self, name: str, item: Initializer) -> str:
        made = torch.empty(item.shape, dtype=item.dtype, device="meta")
        if item.dtype.is_floating_point:
            setattr(self, name, nn.Parameter(made))
        else:
            self.register_buffer(name, made)
        return name

    def _constant(self, step: OnnxStep) -> None:
        ((name, value),) = step.attributes.items()
        if isinstance(value, Initializer):
            if value.values is None:
                held = self._hold(f"constant_{len(self.weights)}", value)
                self.weights[step.outputs[0]] = held
                return
            value = value.values
        kind = numpy.float32 if name.startswith("value_float") else None
        self.constants[step.outputs[0]] = numpy.asarray(value, kind)

    def forward(self, *args: Any) -> Any:
        """The outputs of the graph; one alone is no tuple."""
        values: dict[str, Any] = {"": None, **self.constants}
        values |= {name: getattr(self, held) for name, held in self.weights.items()}
        values |= dict(zip(self.inputs, args, strict=True))
        for number, step in enumerate(self.steps):
            if step.op == "Constant":
                continue
            made = self._run(step, [values[name] for name in step.inputs])
            made = made if isinstance(made, (tuple, list)) else (made,)
            values |= dict(zip(step.outputs, made, strict=False))
            for name in step.inputs:
                if self.last.get(name) == number:
                    values[name] = None
        results = tuple(values[name] for name in self.outputs)
        return results[0] if len(results) == 1 else results

    def _run(self, step: OnnxStep, inputs: list[Any]) -> Any:
        attributes = {"outputs": len(step.outputs), "opset": self.opset, **step.attributes}
        tensors = any(isinstance(item, Tensor) for item in inputs)
        if step.op in onnxops.NUMBER_OPS and (not tensors or step.op in ("Shape", "Size")):
            small = onnxops.on_numbers(step.op, self.opset, step.attributes, inputs)
            if small is not None:
                return small
        if not tensors and step.op not in ("ConstantOfShape", "Range"):
            inputs = [onnxops.tensor(item) for item in inputs]
        return onnxops.OPS[step.op](attributes, *inputs)
