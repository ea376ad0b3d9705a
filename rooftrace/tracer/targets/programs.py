"""A program in a file as a module on meta, with inputs of the requested sizes.

Which sizes may change is in the file: a dimension is fixed, or it has a name and a range there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError, TargetError, hint
from rooftrace.tracer.callables import named_class, program_module
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
    for option in ("mesh", "settings", "kv", "schedule", "microbatches"):
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
        from rooftrace.tracer.targets.onnxfile import read_onnx

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
            usual[name] = _hint_of(symbolic)
        entries.append(ProgramInput(spec.arg.name, tuple(sizes), value.dtype))
    ranges = {}
    for symbol, span in program.range_constraints.items():
        top = int(span.upper) if span.upper.is_Integer else 1 << 62
        ranges[str(symbol)] = (int(span.lower) if span.lower.is_Integer else 0, top)
    return entries, others, Dimensions(usual, ranges)


def _hint_of(size: Any) -> int | None:
    hinted = size.node.hint
    return int(hinted) if hinted is not None else None


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
