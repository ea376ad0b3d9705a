"""Records as plain data: the keys that they name, and what becomes of each kind of value."""

import dataclasses
import importlib
import json
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import rooftrace
from rooftrace._plain import Plain, keys_of, plain


class Point(msgspec.Struct):
    x: float


@dataclass(frozen=True, slots=True)
class Part(Plain):
    name: str
    size: int = 0


@dataclass(frozen=True)
class Made(Plain):
    part: Part
    names: tuple[str, str] = ("a", "b")
    sizes: Any = None

    KEYS = "first=names.0 part=part.name **sizes twice missing? total"
    missing = ""

    @property
    def twice(self) -> int:
        return 2 * self.part.size

    def total(self) -> float:
        return math.inf


def test_a_record_is_its_fields_or_the_keys_that_it_names() -> None:
    assert Part("p", 1).to_dict() == {"name": "p", "size": 1}
    assert list(Made(Part("p", 2), sizes={"batch": 8}).to_dict().items()) == [
        ("first", "a"),
        ("part", "p"),
        ("batch", 8),
        ("twice", 4),
        ("total", None),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, "a", True, None), [1, "a", True, None]),
        ({1: (2.5, math.nan)}, {"1": [2.5, None]}),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (Path("a/b"), "a/b"),
        (Fraction(1, 3), "1/3"),
        (Point(-math.inf), {"x": None}),
        ([Part("p")], [{"name": "p", "size": 0}]),
    ],
)
def test_a_value_is_as_json_holds_it(value: Any, expected: Any) -> None:
    made = plain(value)
    assert made == expected and json.loads(json.dumps(made, allow_nan=False)) == expected


def records(of: type = Plain) -> Iterator[type[Plain]]:
    for each in of.__subclasses__():
        yield each
        yield from records(each)


def test_every_key_of_a_record_can_be_read() -> None:
    for module in pkgutil.walk_packages(rooftrace.__path__, "rooftrace."):
        if not module.ispkg and module.name.split(".")[-1] in MODULES:
            importlib.import_module(module.name)
    checked = {each for each in records() if each.__module__.startswith("rooftrace.")}
    assert len(checked) > 30
    for each in checked:
        fields = {field.name for field in dataclasses.fields(each)}  # type: ignore[arg-type]
        for _, path, _ in keys_of(each.KEYS):
            first = path.split(".")[0]
            assert first == "*" or first in fields or hasattr(each, first), (each, path)


MODULES = {
    path.stem
    for path in Path(rooftrace.__path__[0]).rglob("*.py")
    if "import Plain" in path.read_text(encoding="utf-8")
}
"""The files that have such records."""
