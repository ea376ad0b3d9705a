"""What a change of config.json does to the parameters of its model, which is built on meta."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooftrace._progress import tell
from rooftrace._reading import FileKind, json_of, text_of
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.changes.aligning import union
from rooftrace.tracer.checkpoints.records import ConfigDiff
from rooftrace.tracer.inventory import compare_parameters, inventory_of
from rooftrace.tracer.targets import load_module
from rooftrace.tracer.weightfiles import CheckpointError

_LONGEST = 80
"""Letters of a value of a config that are shown."""
_ABSENT = "absent"
_CONFIG = FileKind("JSON file", CheckpointError)


def config_diff(before: str | None, after: str | None) -> ConfigDiff | None:
    """What differs between two config.json; None where one is not there, or nothing differs.

    A model that cannot be built is said in the note.  Raises CheckpointError for a file that is no
    JSON.
    """
    if before is None or after is None:
        return None
    rows = union(_fields(Path(before)), _fields(Path(after)), _ABSENT)
    fields = tuple(row for row in rows if row[1] != row[2])
    if not fields:
        return None
    tell("building the models of both configs")
    try:
        first, second = (
            inventory_of(load_module(path)[0], False, path) for path in (before, after)
        )
    except (TargetError, RequestError) as error:
        return ConfigDiff(fields=fields, parameters=None, note=f"not built: {error}")
    return ConfigDiff(fields=fields, parameters=compare_parameters(first, second))


def _fields(path: Path) -> dict[str, str]:
    table = json_of(text_of(path, _CONFIG), str(path), _CONFIG)
    return dict(_flat("", table))


def _flat(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values in nested tables under the paths of their keys, as JSON."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{place}.{key}" if place else key, item)
    else:
        text = json.dumps(value)
        yield place, text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
