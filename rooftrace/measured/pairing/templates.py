"""From a name in measurements to a target: by a template of the user, or not at all.

Measurements are data, and a target is code that is imported and called.  So a name in a file is a
target only where the user says so: with a template, or with `trust_targets`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace.measured.pairing.reading import MeasuredRequestError
from rooftrace.tracer.asking import names

NAME = "target"
"""The column of what ran."""
SIZES = ("batch", "seq", "kv", "image_size")
"""Columns of sizes; a run has no image_size."""

_LONGEST = 1000
"""Characters of a template, and of the name in a file that is put into one."""
_LARGEST = 10**15
"""The largest size that is put into a template."""
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WORD = re.compile(r"(?!__)[\w-]+")
_PART = r"(?!\.{1,2}(?:/|$))[\w.-]+"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTemplate:
    """A target with places for the name and the sizes of a measured step."""

    text: str  # as the user wrote it
    parts: tuple[tuple[str, str], ...]  # (text, name of the column that follows it or "")

    @property
    def trusts_names(self) -> bool:
        """Whether the name alone is the target: then a file may name any target."""
        return self.parts == (("", NAME),)

    @property
    def names_code(self) -> bool:
        """Whether what it makes is package.module:attr or path/file.py:attr."""
        return not self.text.startswith("hf:") and any(":" in text for text, _ in self.parts)

    def filled(self, values: Mapping[str, Any]) -> str:
        """The target of a step.  Raises MeasuredRequestError for a value that may not stand there.

        values: by column.  A name has letters, digits, "_" and "-" only where the template names
        code, and elsewhere also "." and "/", without a leading "/" and without "..".
        """
        made = [text + (self._checked(name, values) if name else "") for text, name in self.parts]
        target = "".join(made)
        if names.is_script(target) and not (self.trusts_names or names.is_script(self._plain)):
            raise MeasuredRequestError(
                f"--target {shortened(self.text)!r}: {shortened(target)!r} is a script, which a "
                "name in a file cannot run"
            )
        return target

    @property
    def _plain(self) -> str:
        """The template with a harmless word in each place."""
        return "".join(text + ("x" if name else "") for text, name in self.parts)

    def _checked(self, name: str, values: Mapping[str, Any]) -> str:
        value = values.get(name)
        if value is None:
            raise MeasuredRequestError(
                f"--target {shortened(self.text)!r} has {{{name}}}, and the step has no {name}"
            )
        if name != NAME:
            if type(value) is not int or not 0 <= value <= _LARGEST:
                raise MeasuredRequestError(f"{name} is {value!r:.60}: expected a whole number")
            return str(value)
        text = str(value)
        allowed = _WORD if self.names_code else _PATH
        fits = len(text) <= _LONGEST and text.isascii() and allowed.fullmatch(text)
        if not self.trusts_names and not fits:
            expected = (
                'letters, digits, "_" and "-" (in a file it cannot name other code than the '
                "template does)"
                if self.names_code
                else 'a plain relative name, without ":" and ".."'
            )
            raise MeasuredRequestError(
                f"--target {shortened(self.text)!r}: the name {shortened(text)!r}: expected "
                f"{expected}"
            )
        return text


def template_of(text: str, columns: tuple[str, ...] = (NAME, *SIZES)) -> TargetTemplate:
    """The template that a user wrote; "{{" and "}}" stand for braces.

    Only the names of columns stand in braces: nothing is looked up or formatted.  Raises
    MeasuredRequestError for anything else in braces.
    """
    if len(text) > _LONGEST:
        raise MeasuredRequestError(
            f"--target {shortened(text)!r}: {len(text):,} characters; expected at most {_LONGEST:,}"
        )
    parts, literal, end = [], "", 0
    for place in _PLACE.finditer(text):
        literal += text[end : place.start()]
        end = place.end()
        if place[0] in ("{{", "}}"):
            literal += place[0][0]
        elif place[1] in columns:
            parts.append((literal, place[1]))
            literal = ""
        else:
            raise MeasuredRequestError(
                f"--target {shortened(text)!r}: {shortened(place[0])!r}: expected some of "
                f"{', '.join(f'{{{name}}}' for name in columns)}"
            )
    literal += text[end:]
    return TargetTemplate(text=text, parts=(*parts, (literal, "")) if literal else tuple(parts))


def shortened(text: str, most: int = 60) -> str:
    """The beginning of a text that is too long for a message."""
    return text if len(text) <= most else f"{text[:most]}…"


def not_run(name: str) -> MeasuredRequestError:
    """The error of a name in a file, where the user did not say that it is a target."""
    return MeasuredRequestError(
        f"{shortened(name)!r} stands in a file of measurements, and what such a file names is not "
        'run: say with --target what it stands for, for example --target "models.py:{target}", or '
        "--trust-targets if you trust every name in the file"
    )


TRUSTED = template_of(f"{{{NAME}}}")
"""The template of `trust_targets`: each name is a target."""
