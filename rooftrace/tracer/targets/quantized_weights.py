"""Quantised weights of a module, marked with formats from declarations or a GGUF file."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from rooftrace._reading import opened
from rooftrace.errors import TargetError
from rooftrace.hardware.precisions import PRECISIONS, storage_bytes
from rooftrace.hardware.units import format_share, format_traffic, plural
from rooftrace.tracer.targets.declared import Declared
from rooftrace.tracer.targets.quantized_modules import Scheme, WeightFormat, plain
from rooftrace.tracer.values import masks

# -- gguf ------------------------------------------------------------------------------------------
# GGUF files (llama.cpp): the config of their header, and the type of each tensor.
#
# The packages `gguf` and transformers read them; only the header is, and no weight.

_WHOLE = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64", "MXFP4": "mxfp4",
          "NVFP4": "nvfp4", "I8": "int8"}  # fmt: skip


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file: the name of its type, its precision, and how many numbers."""

    kind: str
    precision: str
    elements: int


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The fields of a config, and the tensors by their names in the file.  Raises TargetError."""
    where = f"target {str(path)!r}"
    try:
        with opened(path) as file:
            magic = file.read(4)
    except OSError as error:
        raise TargetError(f"{where}: {error.strerror}") from None
    if magic != b"GGUF":
        raise TargetError(f"{where}: it begins with {magic!r}: expected a GGUF file")
    if importlib.util.find_spec("gguf") is None:
        raise TargetError(
            f"{where}: a GGUF file: pip install 'rooftrace[hf,gguf]' to read its header, or name "
            "the config.json of the model that it was made from, with --weights-dtype int4_g32"
        )
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        data = dict(load_gguf_checkpoint(str(path), return_tensors=False)["config"])
        tensors = {
            t.name: GgufTensor(t.tensor_type.name, _precision(t.tensor_type), int(t.n_elements))
            for t in GGUFReader(str(path)).tensors
        }
    except TargetError:
        raise
    except Exception as error:  # its reader raises NumPy's errors
        reason = " ".join(str(error).split())
        raise TargetError(f"{where}: it cannot be read as a GGUF file: {reason:.200}") from None
    return data, tensors


def _precision(kind: Any) -> str:
    """The precision of a GGML type: bits of a number, and of the rest of a block."""
    from gguf import GGML_QUANT_SIZES

    if kind.name in _WHOLE:
        return _WHOLE[kind.name]
    numbers, size = GGML_QUANT_SIZES[kind]
    digits = [c for c in kind.name.partition("_")[0] if c.isdigit()]
    width = f"int{digits[0]}" if digits else ""
    if width not in PRECISIONS:
        raise TargetError(f"a tensor of type {kind.name}, which is not known here")
    scale_bits = 8 * size - int(PRECISIONS[width].bits) * numbers
    return WeightFormat(width, numbers, scale=Fraction(scale_bits)).name(numbers)


def mark_gguf(module: nn.Module, tensors: Mapping[str, GgufTensor]) -> str:
    """Mark the parameters of a module with the types of a file; a sentence for the reader."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    config: Any = module.config
    processor = theirs.TENSOR_PROCESSORS.get(config.model_type, theirs.TensorProcessor)(config={})
    names = theirs.get_gguf_hf_weights_map(module, processor)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    counts: Counter[str] = Counter()
    left = []
    for name, tensor in tensors.items():
        place = names.get(name, "")
        if place not in parameters:
            left.append(tensor)
            continue
        counts[tensor.kind] += tensor.elements
        path, _, short = place.rpartition(".")
        masks.store(module.get_submodule(path), short, tensor.precision)
    total = sum(tensor.elements for tensor in tensors.values()) or 1
    parts = [f"{kind} {format_share(n / total)}" for kind, n in counts.most_common(6)]
    text = f"GGUF: numbers are stored as {', '.join(parts)}, and widened for products"
    if not left:
        return text
    size = sum(storage_bytes(t.precision, t.elements) for t in left)
    return (
        f"{text}; {plural(len(left), 'tensor')} ({format_traffic(size)}) of the file have no place "
        f"in {type(module).__name__}, whose other weights are priced as they are computed with"
    )


# -- marking ---------------------------------------------------------------------------------------
# The weights of a module that follow a declaration, each marked with its format.


class _Weight(NamedTuple):
    """A weight that can be quantised.

    names: of the module, as this class and as checkpoints call it.  kind: "Linear" or "Embedding".
    inner: numbers of a row.
    """

    module: nn.Module
    name: str
    tensor: Tensor
    names: tuple[str, ...]
    kind: str
    inner: int
    head: bool
    layered: bool
    expert: bool


class Marked(NamedTuple):
    """Marks of a module: the format of its cache, and sentences for the reader."""

    kv: str | None
    texts: tuple[str, ...]


def marked(module: nn.Module, declared: Sequence[Declared]) -> Marked:
    """Mark the weights of a module (on meta) with the formats that declarations give them."""
    kv: str | None = None
    texts = []
    for declaration in declared:
        scheme = declaration.scheme
        if scheme is None:
            texts.append(_not_understood(module, declaration))
            continue
        kv = kv or scheme.kv
        texts.append(_mark(module, declaration, scheme))
        texts += [f"{declaration.where}: {problem}" for problem in scheme.unread]
    return Marked(kv, tuple(texts))


def forms_of_copy(
    module: nn.Module, declared: Sequence[Declared], inside: str, names: Sequence[str]
) -> dict[int, str]:
    """{id of a weight below the path `inside`: its format in a copy that bears these names}.

    Without weights that the copy has unquantised.
    """
    forms = {}
    for declaration in declared:
        if declaration.scheme is not None:
            for weight in _weights(module, lambda path: _renamed(path, inside, names)):
                form = _form_of(weight, declaration.scheme)
                if form is not None:
                    forms[id(weight.tensor)] = form.name(weight.inner)
    return forms


def _renamed(path: str, inside: str, names: Sequence[str]) -> Sequence[str]:
    below = path == inside or path.startswith(f"{inside}.")
    return [f"{name}{path[len(inside) :]}" for name in names] if below else (path,)


def _mark(module: nn.Module, said: Declared, scheme: Scheme) -> str:
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    scope = _scope(module, said.part)
    for weight in _weights(module):
        inside = scope is None or id(weight.module) in scope or weight.head
        form = _form_of(weight, scheme) if inside else None
        if form is not None:
            masks.store(weight.module, weight.name, form.name(weight.inner))
            counts[_plain(form)] += 0 if id(weight.tensor) in seen else weight.tensor.numel()
            seen.add(id(weight.tensor))
    total = sum(p.numel() for p in module.parameters()) or 1
    cache = f"; caches are stored as {scheme.kv}" if scheme.kv else ""
    if not counts:
        return f"{said.where} ({scheme.method}) quantises none of the weights{cache}"
    parts = [
        f"{name} ({count / total:.1%} of the parameters)" for name, count in counts.most_common()
    ]
    return (
        f"{said.where} ({scheme.method}): weights are stored as {', '.join(parts)}, with their "
        f"scales (a training step has them unquantised); the others stay as they are{cache}"
    )


def _plain(form: WeightFormat) -> str:
    """A form in words: bits, group and the precision of products."""
    group = f" in groups of {form.group}" if form.group > 0 and form.rows == 1 else ""
    block = f" in blocks of {form.rows} x {form.group}" if form.rows > 1 else ""
    engine = f", products in {form.computes}" if form.computes else ", widened for products"
    return f"{form.element}{group}{block}{engine}"


def _not_understood(module: nn.Module, said: Declared) -> str:
    """The assumption that a module is priced unquantised, for an unknown declaration."""
    total = sum(p.numel() for p in module.parameters()) or 1
    could = sum(w.tensor.numel() for w in _weights(module))
    return (
        f"{said.problem}: the weights of its linear layers ({could / total:.0%} of the parameters) "
        "are priced unquantised; pass --weights-dtype for what they are stored in"
        + ("" if said.where else ", or put the file that declares it (hf_quant_config.json) beside")
    )


def _form_of(weight: _Weight, scheme: Scheme) -> WeightFormat | None:
    for rule in scheme.rules:
        if rule.holds(weight.names, weight.kind):
            return rule.form
    if (
        (weight.head and not scheme.head)
        or (weight.kind == "Embedding" and not scheme.embeddings)
        or (scheme.blocks and not (weight.layered or weight.head))
        or (scheme.experts and not weight.expert)
    ):
        return None
    return scheme.form


def _scope(module: nn.Module, part: str) -> set[int] | None:
    """Modules that belong to one config inside of the model's; None for all."""
    config = getattr(module, "config", None)
    for name in part.split(".") if part else ():
        config = getattr(config, name, None)
    if not part or config is None:
        return None
    owners = [m for m in module.modules() if getattr(m, "config", None) is config]
    return {id(inner) for owner in owners for inner in owner.modules()} or None


def _weights(
    module: nn.Module, called: Callable[[str], Sequence[str]] = lambda path: (path,)
) -> Iterator[_Weight]:
    """Matrices of linear layers, of experts and of embeddings; a tied one under each of its paths.

    called: the paths that a module's path stands for.
    """
    output = getattr(module, "get_output_embeddings", lambda: None)()
    tied = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    for path, part in module.named_modules():
        for name, tensor in part._parameters.items():
            expert = "expert" in path or "Expert" in type(part).__name__
            kind = _kind(part, name, tensor, tied, expert)
            if kind is None or tensor is None:
                continue
            names = tuple(n for each in called(path) for n in _names(each, name, tensor))
            inner = tensor.shape[_inner_of(part, tensor)]
            layered = any(piece.isdigit() for piece in path.split("."))
            head = part is output
            yield _Weight(part, name, tensor, names, kind, inner, head, layered, expert)


def _kind(
    part: nn.Module, name: str, tensor: Tensor | None, tied: set[int], expert: bool
) -> str | None:
    """Whether a parameter is the matrix of a linear layer (of experts: all of them) or a table."""
    if tensor is None or not tensor.is_floating_point():
        return None
    if isinstance(part, nn.Embedding) or (id(tensor) in tied and name == "weight"):
        return "Embedding"
    plain_linear = isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    if plain_linear and name == "weight" and tensor.dim() == 2:
        return "Linear"
    custom = expert and not type(part).__module__.startswith("torch.")
    return "Linear" if custom and tensor.dim() == 3 and min(tensor.shape[1:]) > 1 else None


def _inner_of(part: nn.Module, tensor: Tensor) -> int:
    """The dimension along which a weight's products sum."""
    transposed = type(part).__name__ == "Conv1D" or getattr(part, "is_transposed", False)
    return -2 if transposed and tensor.dim() > 1 else -1


def _names(path: str, name: str, tensor: Tensor) -> Iterator[str]:
    """Names that checkpoints give the module of a weight.

    transformers keeps all experts of a layer in one tensor, and checkpoints have a module for each:
    "mlp.experts" with "gate_up_proj" is "mlp.experts.0.gate_proj" and "mlp.experts.0.up_proj".
    """
    for full in dict.fromkeys((path, plain(path))):
        yield full
        if tensor.dim() == 3:
            yield f"{full}.{name}"
            for single in ("gate", "up") if "gate_up" in name else (name,):
                yield f"{full}.0.{name.replace('gate_up', single)}"
