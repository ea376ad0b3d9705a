"""A Hugging Face config with some fields changed, before a model is built of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rooftrace.errors import RequestError, hint

PREFIX = "config."
_LAYERS = re.compile(r"(num|n)_(.*_)?layers?|.*layers")
"""Fields that count layers; lists with an item for each layer follow them."""


def with_settings(
    data: Mapping[str, Any], settings: Mapping[str, Any], defaults: Mapping[str, Any], target: str
) -> dict[str, Any]:
    """The config as plain data with these settings; names begin with "config.".

    defaults: the fields that a config of this type has.  Where a number of layers changes, a list
    with an item for each layer is cut, or goes on as it began.  Raises RequestError for a field
    that there is not, or a value of another kind.
    """
    changed: dict[str, Any] = dict(data)
    for name, value in settings.items():
        if not name.startswith(PREFIX):
            raise RequestError(
                f"{name}={value!r:.40}: the settings of {target} begin with {PREFIX!r}, for "
                f"example {PREFIX}num_hidden_layers"
            )
        _change(changed, name.removeprefix(PREFIX).split("."), value, defaults, name)
    return changed


def _change(
    data: dict[str, Any], path: list[str], value: Any, defaults: Mapping[str, Any], name: str
) -> None:
    first, *rest = path
    fields = {**defaults, **data}
    if first not in fields:
        names = [field for field, old in fields.items() if isinstance(old, (int, float, str, dict))]
        raise RequestError(
            f"{name}={value!r:.40}: the config has no field {first!r}{hint(first, names)}"
        )
    old = fields[first]
    if rest:
        if not isinstance(old, Mapping):
            raise RequestError(f"{name}={value!r:.40}: {first!r} has no fields of its own")
        part = dict(old)
        _change(part, rest, value, {}, name)
        data[first] = part
        return
    plain = isinstance(old, (int, float, str)) or old is None
    if not plain or (isinstance(old, (int, float)) and isinstance(value, str)):
        raise RequestError(f"{name}={value!r:.40}: expected a value such as {old!r:.40}")
    data[first] = value
    if _LAYERS.fullmatch(first) and isinstance(old, int) and isinstance(value, int):
        for field, items in fields.items():
            if isinstance(items, list) and len(items) == old > 1:
                data[field] = [items[i % old] for i in range(value)]
