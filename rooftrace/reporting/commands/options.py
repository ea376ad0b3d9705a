"""The declaration of an argument for the command line, Python and the docs; readers of its text.

Each error quotes the option and the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias, TypeVar, get_type_hints

from rooftrace.errors import RequestError, hint

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Option:
    """An argument of Python, and its option on the command line.

    read: makes the value of the text (of all texts together, where it `repeats`).  kind: the type
    of the text; bool is a switch.  words: all texts that are allowed.  shown: the default in
    help.
    """

    help: str
    name: str = ""  # of the argument; of a field, the field's
    flag: str = ""  # "--what-if", or "-o/--out"; "": made of the name
    metavar: str | None = None
    kind: type = str
    read: Callable[[Any], Any] | None = None
    repeats: bool = False
    words: Sequence[str] = ()
    shown: str = ""
    required: bool = False
    least: int | None = None  # of a whole number
    most: int | None = None

    @property
    def spelled(self) -> str:
        """The option as it is typed."""
        return self.flag or "--" + self.name.replace("_", "-")

    @property
    def kept(self) -> Any:
        """The type of its values in a file: that of its reader."""
        return self.kind if self.read is None else get_type_hints(self.read)["return"]

    def value(self, typed: Any) -> Any:
        """The argument that was typed.  Raises RequestError, which quotes it."""
        return typed if self.read is None else self.read(typed)


def option(default: Any = None, *, help: str, **how: Any) -> Any:
    """A field of a record that is an argument, and an option of every command that has the record.

    how: fields of Option.
    """
    return field(default=default, metadata={"option": Option(help=help, **how)})


def options_of(record: type) -> tuple[Option, ...]:
    """The options of a record's fields."""
    declared = {each.name: each.metadata.get("option") for each in fields(record)}
    return tuple(replace(option, name=name) for name, option in declared.items() if option)


def taken(record: type[Record], named: Mapping[str, Any]) -> tuple[Record, dict[str, Any]]:
    """A record of those arguments that are its fields, and the other arguments."""
    used = {each.name: named[each.name] for each in options_of(record) if each.name in named}
    return record(**used), {name: value for name, value in named.items() if name not in used}


# -- readers ---------------------------------------------------------------------------------------

Plain: TypeAlias = bool | int | float | str
_MOST_DIGITS = 18
"""A size of more digits is a slip; Python itself reads no more than 4300."""
_MOST_LISTED = 1 << 17
"""Equal requests that are listed; a step takes less."""
WHAT_IFS = ("interference", "stragglers", "expert-imbalance")


def words(text: str) -> tuple[str, ...]:
    """The parts of a text between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def several(text: str) -> str | list[str]:
    """A word, or several between commas."""
    return text.split(",") if "," in text else text


def _digits(text: str) -> int | None:
    """A whole number in digits alone, or None."""
    text = text.strip()
    plain = text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS
    return int(text) if plain else None


def size_list(option: str, text: str) -> int | tuple[int, ...]:
    """One size, or several between commas."""
    sizes = [_digits(part) or 0 for part in text.split(",")]
    if 0 in sizes:
        raise RequestError(
            f"{option} {text}: expected whole numbers above 0 between commas, for example 1,2,4,8"
        )
    return sizes[0] if len(sizes) == 1 else tuple(sizes)


def mesh(text: str) -> dict[str, int]:
    """Sizes of axes between commas: dp=4,tp=8."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        number = _digits(size)
        if not axis.strip() or number is None or axis.strip() in sizes:
            raise RequestError(
                f"--mesh {text}: expected one size for each axis, for example dp=4,tp=8"
            )
        sizes[axis.strip()] = number
    return sizes


def lengths(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas, from 0 on; 8x64 is 64, eight times."""
    numbers: list[int] = []
    for part in text.split(","):
        count, times, number = part.strip().rpartition("x")
        repeats, length = _digits(count) if times else 1, _digits(number)
        if repeats is None or length is None:
            raise RequestError(
                f"{option} {text}: expected a whole number for each request, for example "
                "4096,100,0 or 8x4096,0"
            )
        numbers += [length] * min(repeats, _MOST_LISTED)
    return tuple(numbers)


def what_ifs(text: str) -> dict[str, float]:
    """Numbers of disturbances between commas: stragglers=0.02,interference=0.1."""
    numbers = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        plain = name.strip().replace("_", "-")
        try:
            numbers[plain.replace("-", "_")] = float(number)
        except ValueError:
            plain = ""
        if plain not in WHAT_IFS:
            raise RequestError(
                f"--what-if {text}: expected a number for {', '.join(WHAT_IFS)}, for "
                f"example stragglers=0.02{hint(plain, WHAT_IFS)}"
            )
    return numbers


def pairs(option: str, texts: Sequence[str], example: str) -> list[tuple[str, str]]:
    """The parts of NAME=VALUE.  Raises RequestError for a text without one of them."""
    parted = [(name.strip(), value) for name, _, value in (t.partition("=") for t in texts)]
    for text, (name, value) in zip(texts, parted, strict=True):
        if not name or not value:
            raise RequestError(f"{option} {text}: expected {example}")
    return parted


def plain(text: Any) -> Any:
    """A whole number, a number, true, false or text of a text; other values stay."""
    if not isinstance(text, str):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


_SETTING = "NAME=VALUE, for example config.num_hidden_layers=8"


def settings(texts: Sequence[str]) -> dict[str, Plain]:
    """Values by name, of NAME=VALUE."""
    return {name: plain(text) for name, text in pairs("--set", texts, _SETTING)}


def variants(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Several values by name, of NAME=V1,V2."""
    named = pairs("--vary", texts, _SETTING)
    return {name: [plain(part) for part in text.split(",") if part] for name, text in named}


def ranges(texts: Sequence[str]) -> dict[str, str | None]:
    """The values of sizes as they are typed, NAME=VALUES or NAME, by name."""
    over: dict[str, str | None] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if equals and not values:
            raise RequestError(f"--over {text}: the range is empty; for example {name}=1..64")
        over[name.strip()] = values if equals else None
    return over


def levels(texts: Sequence[str]) -> dict[str, str]:
    """Values by name as they are typed, of NAME=VALUES."""
    return dict(pairs("--over", texts, "NAME=VALUES, for example devices=1,8,64"))


def open_values(texts: Sequence[str]) -> str | dict[str, str]:
    """The values of the one open size as they are typed, or values by name of NAME=VALUES."""
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    return levels(texts)


def sizes(texts: Sequence[str]) -> dict[str, int | None]:
    """Sizes by name, of NAME=VALUE or NAME."""
    over: dict[str, int | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            over[name.strip()] = int(value.replace("_", "")) if equals else None
        except ValueError:
            raise RequestError(
                f"--over {text}: expected a whole number, for example {name}=64"
            ) from None
    return over


def grid(texts: Sequence[str]) -> dict[str, str]:
    """Levels by factor as they are typed, of NAME=V1,V2."""
    factors: dict[str, str] = {}
    for name, values in pairs("--grid", texts, "NAME=V1,V2, for example batch=1,8,64"):
        if name in factors:
            raise RequestError(
                f"--grid {name}={values}: {name} stands twice; give all of its levels once"
            )
        factors[name] = values
    return factors


def counts(text: str) -> list[int]:
    """Numbers of chips between commas."""
    try:
        return [int(part) for part in words(text)]
    except ValueError:
        raise RequestError(f"--chips {text}: expected numbers, as 1,2,4,8") from None


def by_chip(option: str, texts: Sequence[str]) -> Any:
    """One number for all chips, or numbers by chip, with commas or one in each option."""
    numbers: dict[str, float] = {}
    texts = [part for text in texts for part in text.split(",")]
    for text in texts:
        name, equals, value = text.rpartition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise RequestError(
                f"{option} {text}: expected a number, or CHIP=NUMBER, as h200-sxm=3.20"
            ) from None
        if not equals and len(texts) > 1:
            raise RequestError(f"{option} {text}: with several, say each as CHIP=NUMBER")
    return numbers.get("") if "" in numbers else numbers


def inputs(texts: Sequence[str]) -> dict[str, str]:
    """Shapes of inputs by name, of NAME=SHAPE:DTYPE."""
    named = {}
    for item in texts:
        name, equals, text = item.partition("=")
        if not equals:
            raise RequestError(
                f"--input {item!r}: expected NAME=SHAPE:DTYPE, for example x=8,3,224,224:fp32"
            )
        named[name] = text
    return named


def assumptions(texts: Sequence[str]) -> dict[str, Plain]:
    """Assumptions by kind, of KIND[@MODULE]=VALUE."""
    from rooftrace.graph.assumptions import parse_assumption

    return dict(map(parse_assumption, texts))
