"""Where a config, and the files beside it, declare how the weights of a checkpoint are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace.tracer.targets.quantization.fields import Fields
from rooftrace.tracer.targets.quantization.methods import scheme_of
from rooftrace.tracer.targets.quantization.schemes import Scheme, Unread

BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files beside a config that declare it: of modelopt, of AutoGPTQ, of AutoAWQ."""
_PLACES = ("quantization_config", "compression_config", "quantization")
_NAMED = re.compile(
    r"(?<![a-z0-9])(nvfp4|mxfp[468]|fp8|fp4|int[248]|w\d{1,2}a\d{1,2}|awq|gptq|gguf|bnb|[248]-?bit)"
    r"(?![a-z0-9])",
    re.IGNORECASE,
)

Read = Callable[[str], Any]
"""The contents of a JSON file beside a config, by its name; None where there is none."""


@dataclass(frozen=True)
class Declared:
    """One declaration: where it stands, the config whose modules it is about, what it says.

    part: the name of the config inside of the config, "" for the whole.  scheme: None where it is
    not understood; problem says why.
    """

    where: str
    part: str
    scheme: Scheme | None
    problem: str = ""


def declared_in(data: Mapping[str, Any], read: Read, name: str) -> tuple[Declared, ...]:
    """The declarations of a config, outermost first; the files beside it where it has none.

    data: of a config.json.  name: of the model, which may promise what no file declares.  Raises
    TargetError for a field of the wrong type.
    """
    declarations = [_of(record, data, where, part) for where, part, record in _records(data, "")]
    if not declarations:
        for file in BESIDE:
            record = read(file)
            if record is not None:
                declarations.append(_of(record, data, file, ""))
                break
    promised = _NAMED.search(name)
    if not declarations and promised:
        problem = f"the name {name!r:.60} says {promised[0]}, and no file declares a quantisation"
        declarations.append(Declared("", "", None, problem))
    return tuple(declarations)


def _records(data: Mapping[str, Any], part: str) -> Iterator[tuple[str, str, Any]]:
    """Declarations of a config and of the configs inside: where, of which part, and the record."""
    for place in _PLACES:
        if data.get(place):
            yield f"{part}.{place}".lstrip("."), part, data[place]
            break
    for name, value in data.items():
        if isinstance(value, Mapping) and name.endswith("config") and name not in _PLACES:
            yield from _records(value, f"{part}.{name}".lstrip("."))


def _of(record: Any, data: Mapping[str, Any], where: str, part: str) -> Declared:
    settings = Fields(record, where)
    if "expert_dtype" in Fields(data, where) and "expert_dtype" not in settings:
        settings = Fields({**settings.data, "expert_dtype": data["expert_dtype"]}, where)
    try:
        return Declared(where, part, scheme_of(settings))
    except Unread as unread:
        return Declared(where, part, None, f"{where}: {unread}")
