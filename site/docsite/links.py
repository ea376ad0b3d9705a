"""Links of a page: from files of the repository to pages of the site."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"^(?P<fence>`{3,}|~{3,})(?P<kind>[^\n]*)\n(?P<text>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(
    r"(?P<code>(?P<ticks>`+).+?(?P=ticks))"
    r"|(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL,
)
ELSEWHERE = ("http://", "https://", "mailto:")
HEADING = re.compile(r"^#{1,6} +(?P<title>.+?)[ #]*$", re.MULTILINE)


class BrokenLinkError(ValueError):
    """A link of a page that leads nowhere."""


@dataclass(frozen=True)
class Link:
    """A link of a Markdown text, as written."""

    text: str
    target: str  # "../rooftrace/errors.py", "sweep.md#cliffs", "https://..."
    image: bool
    line: int

    @property
    def path(self) -> str:
        """Without its anchor; "" for a place in the page itself."""
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        return self.target.partition("#")[2]

    @property
    def leads_out(self) -> bool:
        return self.target.startswith(ELSEWHERE)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(where it starts, text) of each stretch of a Markdown text outside of fenced blocks."""
    start = 0
    for fence in FENCE.finditer(text):
        yield start, text[start : fence.start()]
        start = fence.end()
    yield start, text[start:]


def _written(text: str) -> Iterator[tuple[int, int, Link]]:
    for start, part in prose(text):
        for match in LINK.finditer(part):
            if match["code"] is None:
                line = text.count("\n", 0, start + match.start()) + 1
                link = Link(match["text"], match["target"], bool(match["image"]), line)
                yield start + match.start(), start + match.end(), link


def links_of(text: str) -> list[Link]:
    """Every link and image of a Markdown text, code left out."""
    return [link for _, _, link in _written(text)]


def replaced(text: str, change: Callable[[Link], str]) -> str:
    """The text with each link as `change` writes it."""
    parts, end = [], 0
    for start, stop, link in _written(text):
        parts += [text[end:start], change(link)]
        end = stop
    return "".join([*parts, text[end:]])


def anchors_of(text: str) -> set[str]:
    """The anchors of the headings of a Markdown text, as repositories on the web make them."""
    seen: dict[str, int] = {}
    anchors = set()
    for _, part in prose(text):
        for heading in HEADING.finditer(part):
            title = LINK.sub(lambda link: link["text"] or link["code"], heading["title"])
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            anchors.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
            seen[slug] = seen.get(slug, 0) + 1
    return anchors


@dataclass(frozen=True)
class Resolver:
    """Where a file of the repository is found on the site.

    pages: the page of each file that is one: {"docs/sweep.md": "sweep.md"}.  assets: folders whose
    files are copied as they are: {"docs/accuracy": "accuracy"}.  web: the address of the
    repository's files, with a "/" at its end, or "" where it has none.
    """

    root: Path
    pages: Mapping[str, str]
    assets: Mapping[str, str]
    web: str = ""

    def on_site(self, text: str, source: str) -> str:
        """The Markdown of the file `source` with links that hold on the page made of it.

        What is no part of the site is linked in the repository on the web; where that has no
        address, the path stands there as code.  Raises BrokenLinkError, which names the line.
        """
        page = self.pages[source]

        def change(link: Link) -> str:
            mark = "!" if link.image else ""
            anchor = f"#{link.anchor}" if link.anchor else ""
            if link.leads_out:
                return f"{mark}[{link.text}]({link.target})"
            file = self.file(link, source)
            if place := self.place(file):
                way = posixpath.relpath(place, posixpath.dirname(page) or ".") if link.path else ""
                return f"{mark}[{link.text}]({way}{anchor})"
            if self.web:
                return f"[{link.text}]({self.web}{file}{anchor})"
            name = link.text.strip("`")
            return f"`{file}`" if file.endswith(name) else f"{link.text} (`{file}`)"

        return replaced(text, change)

    def file(self, link: Link, source: str) -> str:
        """The path in the repository that a link of the file `source` leads to.

        Raises BrokenLinkError where there is no such file, or no such heading in it.
        """
        above = posixpath.dirname(source)
        file = posixpath.normpath(posixpath.join(above, link.path)) if link.path else source
        told = f"{source}:{link.line} links {link.target}"
        if file.startswith("..") or not os.path.lexists(self.root / file):
            raise BrokenLinkError(f"{told}: there is no {file}")
        if link.anchor and file.endswith(".md"):
            known = anchors_of((self.root / file).read_text(encoding="utf-8"))
            if link.anchor not in known:
                raise BrokenLinkError(f"{told}: {file} has no heading #{link.anchor}")
        return file

    def place(self, file: str) -> str:
        """The path on the site of a file of the repository, "" where it is not part of it."""
        folder, name = posixpath.split(file)
        if folder in self.assets:
            return posixpath.join(self.assets[folder], name)
        return self.pages.get(file, "")
