"""The gallery: scripts that draw, their pictures, and how to read each of them.

The docstring of a script has its title on the first line, then a paragraph for each picture: the
name of its file, a colon, and one sentence on how to read it.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from docsite.notebooks import working_in

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "gallery"
LIST = re.compile(r"(?<=<!-- gallery -->\n).*?(?=<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"(?P<file>[\w-]+\.(?:png|svg|html)): (?P<reading>.+)", re.DOTALL)


class GalleryError(ValueError):
    """A script of the gallery is not as the gallery expects it."""


@dataclass(frozen=True)
class Entry:
    """A script of the gallery, as its text says."""

    path: Path
    title: str  # "A sweep: a step at every batch", without its full stop
    readings: Mapping[str, str]  # how to read each picture, by file: {"sweep.png": "Flat ..."}
    code: str  # without the docstring

    @property
    def name(self) -> str:
        """ "sweep" of 03_sweep.py."""
        return self.path.stem.partition("_")[2]


def entries(folder: Path = FOLDER) -> list[Entry]:
    """Every script of the gallery, in its order."""
    return [entry(path) for path in sorted(folder.glob("[0-9]*.py"))]


def entry(path: Path) -> Entry:
    """Read a script.  Raises GalleryError where its docstring names no picture as it should."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    about = ast.get_docstring(tree)
    if about is None:
        raise GalleryError(f"{path.name}: expected a docstring with a title and its pictures")
    title, *paragraphs = about.split("\n\n")
    readings = {}
    for paragraph in paragraphs:
        match = PICTURE.fullmatch(paragraph)
        if match is None:
            raise GalleryError(
                f"{path.name}: {paragraph[:60]!r}: expected a picture's file and how to read it, "
                "for example 'sweep.png: Flat stretches cost nothing.'"
            )
        readings[match["file"]] = " ".join(match["reading"].split())
    if not readings:
        raise GalleryError(f"{path.name}: its docstring names no picture")
    code = "\n".join(text.splitlines()[tree.body[0].end_lineno :]).strip()
    return Entry(path, " ".join(title.split()).rstrip("."), readings, code)


def as_list(made: list[Entry]) -> str:
    """The list that docs/gallery.md has: each script with its title and its pictures."""
    lines = []
    for each in made:
        files = ", ".join(f"`{file}`" for file in each.readings)
        link = f"[{each.title}](../examples/gallery/{each.path.name})"
        lines.append(f"- {link}: {files}\n")
    return "".join(lines)


def with_list(page: str, filling: str) -> str:
    """The text of docs/gallery.md with another list."""
    if not LIST.search(page):
        raise GalleryError("docs/gallery.md: expected a place for the list: <!-- gallery -->")
    return LIST.sub(lambda _: filling, page)


def draw(each: Entry, out: Path) -> None:
    """Run a script in an empty folder, and move what its docstring names to `out`.

    Raises GalleryError for a picture that it did not make, and what the script raises.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with working_in(folder):
            runpy.run_path(str(each.path), run_name="__main__")
        for file in each.readings:
            if not (Path(folder) / file).is_file():
                made = ", ".join(sorted(path.name for path in Path(folder).iterdir())) or "nothing"
                raise GalleryError(f"{each.path.name} did not make {file}, but {made}")
            shutil.move(Path(folder) / file, out / file)


def section(each: Entry, folder: Path, above: str) -> str:
    """The Markdown of a script: each picture with how to read it, then the code.

    folder: where its pictures are; above: the path to it from the page.
    """
    heading, _, about = each.title.partition(": ")
    parts = [f"## {heading}", *([f"{about[0].upper()}{about[1:]}."] if about else [])]
    for file, reading in each.readings.items():
        target, picture = f"{above}/{file}", f"{above}/{file}"
        if file.endswith(".html"):
            picture = f"{above}/{Path(file).stem}.png"
            if not (folder / f"{Path(file).stem}.png").exists():
                parts.append(f"{reading} [Open the page]({target}){{ target=_blank }}.")
                continue
        parts.append(f"[![{file}]({picture})]({target}){{ target=_blank }}")
        parts.append(f"{reading}")
    parts.append(f"```python\n{each.code}\n```")
    return "\n\n".join(parts) + "\n\n"
