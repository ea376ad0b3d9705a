"""GGUF files (llama.cpp): the config of their header, and the type of each tensor.

The packages `gguf` and transformers read them; only the header is, and no weight.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from rooftrace._reading import opened
from rooftrace.errors import TargetError
from rooftrace.hardware.precisions import PRECISIONS, storage_bytes
from rooftrace.hardware.units import format_share, format_traffic, plural
from rooftrace.tracer.targets.quantization.schemes import WeightFormat
from rooftrace.tracer.values import marks

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
    except Exception as error:  # its reader raises what NumPy does
        reason = " ".join(str(error).split())
        raise TargetError(f"{where}: it cannot be read as a GGUF file: {reason:.200}") from None
    return data, tensors


def _precision(kind: Any) -> str:
    """The precision of a GGML type: bits of a number, and what else stands in a block."""
    from gguf import GGML_QUANT_SIZES

    if kind.name in _WHOLE:
        return _WHOLE[kind.name]
    numbers, size = GGML_QUANT_SIZES[kind]
    digits = [c for c in kind.name.partition("_")[0] if c.isdigit()]
    width = f"int{digits[0]}" if digits else ""
    if width not in PRECISIONS:
        raise TargetError(f"a tensor of type {kind.name}, which is not known here")
    beside = 8 * size - int(PRECISIONS[width].bits) * numbers
    return WeightFormat(width, numbers, scale=Fraction(beside)).name(numbers)


def mark_gguf(module: nn.Module, tensors: Mapping[str, GgufTensor]) -> str:
    """Mark the parameters of a module with the types of a file; a sentence for the reader."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    config: Any = module.config
    processor = theirs.TENSOR_PROCESSORS.get(config.model_type, theirs.TensorProcessor)(config={})
    places = theirs.get_gguf_hf_weights_map(module, processor)
    own = dict(module.named_parameters(remove_duplicate=False))
    counts: Counter[str] = Counter()
    left = []
    for name, tensor in tensors.items():
        place = places.get(name, "")
        if place not in own:
            left.append(tensor)
            continue
        counts[tensor.kind] += tensor.elements
        path, _, short = place.rpartition(".")
        marks.store(module.get_submodule(path), short, tensor.precision)
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
