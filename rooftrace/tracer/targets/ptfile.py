"""Reads files of torch.export.save as data: graph, weights, inputs, and size expressions."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rooftrace._reading import MOST_BYTES, FileKind, json_of
from rooftrace.errors import TargetError
from rooftrace.tracer import torch_private

# -- inputs ----------------------------------------------------------------------------------------
# The inputs of a program: which sizes are fixed, and which may change.


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An input of a program.  sizes: a number where the dimension is fixed, else its name."""

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a program's inputs that may change: sizes as exported, and ranges."""

    usual: Mapping[str, int | None]  # None: nothing says
    ranges: Mapping[str, tuple[int, int]]


# -- ptfile ----------------------------------------------------------------------------------------
# Reads a file of torch.export.save as data: its graph is checked, and no pickle is opened.
#
# torch.export.load would run code of the file: pickles of weights, constants and sample
# inputs, expressions that Python evaluates, guards that are compiled, compiled libraries.  Here
# the graph is parsed as JSON; ops have to be ops of torch that are there, sizes arithmetic;
# weights are their shapes alone.  torch then builds the checked program.

KIND = FileKind("exported program", TargetError)
_MOST_ENTRIES = 1_000_000
_MOST_CONSTANT = 1 << 25
"""Bytes of a buffer or constant whose values are read; of a larger one only the sizes are read."""
_TARGET = re.compile(
    r"torch\.ops(?!\.(?:load_library|import_module|loaded_libraries)\b)(?:\.(?!__)\w+){2,3}"
    r"|_operator\.(?!__)\w+|math\.(?!__)\w+|torch\.sym_\w+"
)
_NOTES = ("nn_module_stack", "stack_trace")
_HINT = "only its graph is read, and never a pickle in it"


def read_program(path: Path) -> Any:
    """The torch.export.ExportedProgram of a file, its weights on meta.

    Raises OSError, and TargetError for another file, one that is damaged or too large, one that
    holds more than a graph of ops, and one of another version of the format.
    """
    where = str(path)
    if not zipfile.is_zipfile(path):
        raise KIND.unreadable(where, "it is no zip, or it is cut off")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _entries(archive, where)
            document = json_of(
                _text(archive, entries, _model_in(entries, where), where), where, KIND
            )
            _check(document, where)
            _strip(document)
            held = _held(document, archive, entries, where)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, UnicodeDecodeError) as problem:
        raise KIND.unreadable(where, problem) from None
    except (KeyError, TypeError, AttributeError, IndexError) as problem:
        raise KIND.unreadable(
            where, f"its graph is not of the form that is known: {problem!r}"
        ) from None
    return _built(document, held, where)


# -- the archive -----------------------------------------------------------------------------------


def _entries(archive: zipfile.ZipFile, where: str) -> dict[str, zipfile.ZipInfo]:
    """The entries by their names inside of the archive's folder."""
    entries = archive.infolist()
    if len(entries) > _MOST_ENTRIES:
        raise KIND.unreadable(where, f"it has more than {_MOST_ENTRIES:,} entries")
    return {entry.filename.partition("/")[2]: entry for entry in entries}


def _model_in(entries: Mapping[str, zipfile.ZipInfo], where: str) -> str:
    names = sorted(n for n in entries if n.startswith("models/") and n.endswith(".json"))
    if len(names) == 1:
        return names[0]
    if names:
        raise KIND.refused(where, f"it holds {len(names)} programs; expected one")
    if any(name.startswith("data/aotinductor/") for name in entries):
        raise KIND.refused(
            where, "it holds compiled code, which is not run; export the module alone"
        )
    raise KIND.unreadable(
        where,
        "no models/*.json is in it; expected what torch.export.save writes (torch 2.8 or later)",
    )


def _text(
    archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], name: str, where: str
) -> bytes:
    """The bytes of an entry, unpacked, up to the bound of all files."""
    with archive.open(entries[name]) as file:
        raw = _most(file)
    if len(raw) > MOST_BYTES:
        raise KIND.unreadable(where, f"{name} in it has more than {MOST_BYTES >> 20} MiB, unpacked")
    return raw


def _most(file: IO[bytes]) -> bytes:
    return file.read(MOST_BYTES + 1)


# -- allowed parts of a graph ----------------------------------------------------------------------


def _tables(item: Any) -> Iterator[dict[str, Any]]:
    """Every table of a document, outer ones first."""
    waiting = [item]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _check(document: Any, where: str) -> None:
    """Raise TargetError for a graph with parts that are not read."""
    unknown: Counter[str] = Counter()
    for table in _tables(document):
        if isinstance(target := table.get("target"), str) and "inputs" in table:
            if target.startswith("torch.ops.aten.from_file"):
                raise KIND.refused(where, f"{target}: it reads a file, which a program may not")
            if not _TARGET.fullmatch(target):
                raise KIND.refused(where, f"{target!r:.80} is no op; {_HINT}")
            if not _is_there(target):
                unknown[target.removeprefix("torch.ops.")] += 1
        if "expr_str" in table:
            try:
                checked(str(table["expr_str"]))
            except ExpressionError as error:
                raise KIND.refused(where, f"a size: {error}") from None
        if "custom_obj" in table or "as_custom_obj" in table:
            raise KIND.refused(where, f"it holds a custom object, which may run code; {_HINT}")
        for spec in ("in_spec", "out_spec"):
            if "defaultdict" in str(table.get(spec)):
                raise KIND.refused(where, f"a defaultdict among its inputs or outputs; {_HINT}")
    if unknown:
        named = ", ".join(f"{name} x{count}" for name, count in sorted(unknown.items())[:12])
        raise KIND.refused(
            where,
            f"ops that are not there: {named}; register them with the package that has them, "
            "imported by --rules FILE.py",
        )


def _is_there(target: str) -> bool:
    """Whether a name leads to an op of torch, or to a function of numbers."""
    base, *parts = target.split(".")
    item: Any = {"torch": torch, "_operator": operator, "math": math}[base]
    for part in parts:
        try:
            item = getattr(item, part)
        except (AttributeError, RuntimeError):
            return False
    if base == "torch" and parts[0] == "ops":
        return isinstance(item, (torch_private.OpOverload, torch_private.HigherOrderOperator))
    return callable(item)


def _strip(document: dict[str, Any]) -> None:
    """Take out code to compile or import, and the devices of saved tensors."""
    document["guards_code"] = []
    document["verifiers"] = ["TRAINING"]
    for table in _tables(document):
        if isinstance(notes := table.get("metadata"), dict):
            table["metadata"] = {n: notes[n] for n in _NOTES if isinstance(notes.get(n), str)}
        if {*table} == {"type", "index"}:
            table |= {"type": "cpu", "index": None}


# -- weights and constants -------------------------------------------------------------------------


def _held(
    document: dict[str, Any],
    archive: zipfile.ZipFile,
    entries: Mapping[str, zipfile.ZipInfo],
    where: str,
) -> dict[str, dict[str, Tensor]]:
    """Parameters and buffers, and constants, by their names: on meta, small ones as values."""
    graph = document["graph_module"]
    values = graph["graph"]["tensor_values"]
    stored = _stored(archive, entries, where)
    held: dict[str, dict[str, Tensor]] = {"state": {}, "constants": {}}
    for spec in graph["signature"]["input_specs"]:
        for kind, name_key in (
            ("parameter", "parameter_name"),
            ("buffer", "buffer_name"),
            ("tensor_constant", "tensor_constant_name"),
        ):
            if kind not in spec:
                continue
            name, meta = spec[kind][name_key], values[spec[kind]["arg"]["name"]]
            lasting = kind == "parameter" or spec[kind].get("persistent", False)
            tensor = _tensor(meta)
            if kind != "parameter" and name in stored:
                tensor = _read(archive, entries, stored[name], tensor, where)
            tensor.requires_grad_(kind == "parameter" and bool(meta["requires_grad"]))
            wrapped = (
                torch.nn.Parameter(tensor, tensor.requires_grad) if kind == "parameter" else tensor
            )
            held["state" if lasting else "constants"][name] = wrapped
    return held


def _stored(
    archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], where: str
) -> dict[str, str]:
    """Entries that hold the bytes of tensors, by the names of the tensors; no pickles."""
    payloads: dict[str, str] = {}
    for folder in ("weights", "constants"):
        for name in entries:
            if re.fullmatch(rf"data/{folder}/[^/]*_config\.json", name):
                config = json_of(_text(archive, entries, name, where), where, KIND)
                for key, payload in config["config"].items():
                    if not payload["use_pickle"]:
                        payloads[key] = f"data/{folder}/{payload['path_name']}"
    return payloads


def _tensor(meta: Mapping[str, Any]) -> Tensor:
    """A tensor on meta of the sizes and strides that a graph has for one."""

    sizes, strides = ([_size(size) for size in meta[key]] for key in ("sizes", "strides"))
    dtype = torch_private.SERIALIZED_DTYPES[meta["dtype"]]
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def _size(size: Mapping[str, Any]) -> int:
    number = size["as_int"] if "as_int" in size else evaluated(size["as_expr"]["expr_str"], {})
    if not isinstance(number, int) or not 0 <= number < 1 << 62:
        raise TypeError(f"a size of {number!r:.40}")
    return number


def _read(
    archive: zipfile.ZipFile,
    entries: Mapping[str, zipfile.ZipInfo],
    name: str,
    tensor: Tensor,
    where: str,
) -> Tensor:
    """A small tensor with its values, where the file has exactly its bytes."""
    size = tensor.numel() * tensor.element_size()
    entry = entries.get(name)
    if entry is None or entry.file_size != size or not 0 < size <= _MOST_CONSTANT:
        return tensor
    if not tensor.is_contiguous():
        return tensor
    raw = bytearray(archive.read(entry)[:size])
    return torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape).clone()


# -- the program -----------------------------------------------------------------------------------


def _built(document: dict[str, Any], held: Mapping[str, dict[str, Tensor]], where: str) -> Any:
    """The program of a checked document."""
    read = torch_private.bytes_to_dataclass
    build = torch_private.ExportedProgramDeserializer
    try:
        record = read(torch_private.ExportedProgram, json.dumps(document).encode())
        return build().deserialize(record, held["state"], held["constants"], None)
    except Exception as problem:  # whatever torch says of a document that does not hold together
        raise KIND.unreadable(where, f"torch {torch.__version__}: {problem}") from None


# -- expressions -----------------------------------------------------------------------------------
# Sizes that a file writes as expressions: checked to be plain arithmetic, and evaluated.
#
# torch evaluates such a text as Python, so nothing else may stand in it.


_MOST_LETTERS = 10_000
_MOST_POWER = 8
_MOST_POWERS = 3
_MOST = 1 << 63
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Integer": int,
    "Add": lambda *parts: sum(parts),
    "Mul": lambda *parts: math.prod(parts),
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "Pow": lambda a, b: a**b,
}
_ONLY_READ = (
    "Symbol",
    "Eq",
    "Ne",
    "Lt",
    "Le",
    "Gt",
    "Ge",
    "And",
    "Or",
    "Not",
    "Rational",
    "Float",
    "Equality",
    "Unequality",
    "StrictLessThan",
    "LessThan",
    "StrictGreaterThan",
    "GreaterThan",
    "ModularIndexing",
    "IntTrueDiv",
    "ToFloat",
    "TruncToInt",
    "FloatTrueDiv",
)


class ExpressionError(ValueError):
    """A text that is no arithmetic of sizes."""


def checked(text: str) -> ast.expr:
    """The expression of a text.  Raises ExpressionError for anything but arithmetic of sizes."""
    if len(text) > _MOST_LETTERS:
        raise ExpressionError(f"an expression of {len(text):,} letters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError(f"{text!r:.80} is no expression") from None
    nodes = list(_inside(tree))
    if not all(map(_is_plain, nodes)) or sum(map(_is_power, nodes)) > _MOST_POWERS:
        raise ExpressionError(f"{text!r:.80} is more than arithmetic of sizes")
    return tree


def _inside(tree: ast.expr) -> Iterator[ast.AST]:
    """Every node that stands for a value."""
    yield tree
    if isinstance(tree, ast.Call):
        for part in tree.args:
            yield from _inside(part)
        yield from tree.keywords
    elif isinstance(tree, ast.BinOp):
        yield from _inside(tree.left)
        yield from _inside(tree.right)
    elif isinstance(tree, ast.UnaryOp):
        yield from _inside(tree.operand)


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        texts = [p for p in node.args if isinstance(p, ast.Constant) and isinstance(p.value, str)]
        named = name in _FUNCTIONS or name in _ONLY_READ
        power = name != "Pow" or (len(node.args) == 2 and _is_small(node.args[1]))
        return named and power and len(texts) == (1 if name in ("Symbol", "Float") else 0)
    if isinstance(node, ast.keyword):
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        return isinstance(value, (bool, int)) and (node.arg or "").isidentifier()
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return node.value.replace(".", "").isidentifier() or _is_number(node.value)
        return isinstance(node.value, (bool, float)) or (
            isinstance(node.value, int) and abs(node.value) < _MOST
        )
    if isinstance(node, ast.Name):
        return node.id.isidentifier() and not node.id.startswith("_") and node.id[-1:].isdigit()
    if isinstance(node, ast.BinOp):
        power = not isinstance(node.op, ast.Pow) or _is_small(node.right)
        return power and isinstance(
            node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.Div)
        )
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd))


def _is_power(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Pow)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Pow"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_small(power: ast.expr) -> bool:
    """Whether a power is an integer that makes no giant."""
    if isinstance(power, ast.Call) and len(power.args) == 1:
        power = power.args[0]
    if isinstance(power, ast.UnaryOp):
        power = power.operand
    value = power.value if isinstance(power, ast.Constant) else None
    return isinstance(value, int) and abs(value) <= _MOST_POWER


def _symbol(tree: ast.expr) -> str | None:
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "Symbol":
        first = tree.args[0]
        return str(first.value) if isinstance(first, ast.Constant) else None
    return None


def evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression.  Raises ExpressionError where it is no integer."""
    try:
        return _value(checked(text), sizes)
    except (KeyError, TypeError, ZeroDivisionError, OverflowError):
        raise ExpressionError(f"{text!r:.80} has no value") from None


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    symbol = _symbol(tree)
    if symbol is not None:
        return sizes[symbol]
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        values: Sequence[int] = [_value(part, sizes) for part in tree.args]
        return _FUNCTIONS[tree.func.id](*values)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return int(tree.value)
    if isinstance(tree, ast.BinOp):
        left, right = _value(tree.left, sizes), _value(tree.right, sizes)
        operations: Mapping[type, str] = {
            ast.Add: "Add",
            ast.Mult: "Mul",
            ast.FloorDiv: "FloorDiv",
            ast.Mod: "Mod",
            ast.Pow: "Pow",
        }
        if isinstance(tree.op, ast.Sub):
            return left - right
        return _FUNCTIONS[operations[type(tree.op)]](left, right)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_value(tree.operand, sizes)
    raise TypeError(tree)
