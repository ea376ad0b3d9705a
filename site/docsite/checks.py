"""What must hold of a site: blocks of pages are checked, names are there, nothing leads out."""

from __future__ import annotations

import re
import shlex
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import click
import yaml

from docsite import links, pages, reference
from rooftrace.reporting.cli import cli

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""The attribute with which a tag loads something at once; a link of <a> waits for a click."""
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "manifest", "preconnect"}


def _commands(text: str) -> None:
    """Read the words of each command of rooftrace in lines of a shell; ValueError tells one."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r" (?:&&|\|\|?) ", line):
            program, *words = shlex.split(command, comments=True) or [""]
            called: click.Command = cli
            try:
                while program == "rooftrace" and isinstance(called, click.Group):
                    called = called.commands[words.pop(0)]
                if called is not cli:
                    called.make_context(called.name, words)
            except (click.UsageError, KeyError) as error:
                raise ValueError(f"{command}: {getattr(error, 'message', error)}") from None


READ: Mapping[str, Callable[[str], object]] = {
    "sh": _commands,
    "console": lambda text: _commands("\n".join(re.findall(r"^\$ (.*)", text, re.MULTILINE))),
    "toml": pages.tomllib.loads,
    "yaml": yaml.safe_load,
    "py": lambda text: compile(text, "page", "exec"),
}
"""How a block that no test runs is read, by its language; `console` is marked as output."""


def blocks(text: str) -> Iterator[str]:
    """Every block of a page that is neither run, nor read, nor output; and what is wrong with it.

    Tests run each `python`, and compare a `text` below it and what follows `<!-- golden: -->`.
    """
    last = None
    for block in links.FENCE.finditer(text):
        kind, line = block["kind"], text.count("\n", 0, block.start()) + 1
        above = text[: block.start()].rstrip().rpartition("\n")[2]
        if kind in READ:
            try:
                READ[kind](block["text"])
            except (ValueError, SyntaxError, yaml.YAMLError) as error:
                yield f"{line}: {error}"
        elif kind == "text" and (last is None or text[last : block.start()] != "\n\n"):
            yield f"{line}: `text` is what `python` just above prints; else write `console`"
        elif kind == "" and not above.startswith("<!-- golden: "):
            yield f"{line}: a block without a language"
        elif kind not in {"", "text", "python", "diagram", "formula"}:
            yield f"{line}: {kind!r} is no language of a block"
        last = block.end() if kind == "python" else None
    for start, prose in links.prose(text):
        for block in re.finditer(r"^(?![ *-]|\d+\. ).*\n\n {4}", prose, re.MULTILINE):
            yield f"{text.count(chr(10), 0, start + block.end()) + 1}: a block without a language"


@dataclass
class Page(HTMLParser):
    """What a page of HTML loads and links, its anchors, and its text."""

    path: Path
    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        loaded = tag != "link" or LOADED_LINKS & set(named.get("rel", "").split())
        if loaded and LOADS.get(tag) in named:
            self.loads.append(named[LOADS[tag]])

    def handle_data(self, data: str) -> None:
        self.text += data


def troubles(site: Path) -> list[str]:
    """What is wrong with a site, a sentence each; none where all is well."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    own = {path: page for path, page in pages.items() if path.name != "404.html"}
    if not own:
        return [f"{site}: no page"]
    return [
        *(f"{_name(site, path)} {each}" for path in own for each in _leads(path, site, pages)),
        *_styles(site),
        *_names(site, pages),
    ]


def _name(site: Path, path: Path) -> str:
    return path.relative_to(site).as_posix()


def _leads(path: Path, site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Every file that a page loads from elsewhere, and every link of it that leads nowhere."""
    page = pages[path]
    for address in page.loads:
        if urllib.parse.urlsplit(address).scheme not in ("", "data") or address.startswith("//"):
            yield f"loads {address}"
    for address in [*page.links, *page.loads]:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme or address.startswith("//"):
            continue
        target = path if not parts.path else (path.parent / urllib.parse.unquote(parts.path))
        target = Path(target.resolve())
        if target.is_dir():
            target /= "index.html"
        if not target.is_relative_to(site.resolve()) or not target.exists():
            yield f"links {address}: there is no such file"
        elif parts.fragment and target in pages:
            # A report's page keeps what was chosen in its address: that is no anchor.
            wanted = urllib.parse.unquote(parts.fragment)
            if wanted not in pages[target].anchors and "__" not in wanted:
                yield f"links {address}: there is no such place"


def _styles(site: Path) -> Iterator[str]:
    """What a style sheet would load from elsewhere."""
    for path in site.rglob("*.css"):
        for address in re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)", path.read_text()):
            yield f"{_name(site, path)} loads {address}"


def _names(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Every public name that has no page, no signature with types, or no docstring there."""
    for name, public in reference.public_names().items():
        path = (site / reference.page_of(name)).with_suffix(".html")
        if path not in pages:
            yield f"rooftrace.{public.path} has no page"
            continue
        text = _words(pages[path].text)
        for sentence in _sentences(reference.docstring(public.module, public.inside) or ""):
            if _words(sentence) not in text:
                yield f"the page of rooftrace.{public.path} does not say {sentence!r}"
        for type_ in reference.types_of(public.module, public.inside):
            if _words(re.sub(r"\b(?:\w+\.)+(?=\w)", "", type_)) not in text:  # Module, of nn.Module
                yield f"the page of rooftrace.{public.path} does not show the type {type_}"


def _words(text: str) -> str:
    """Letters and digits alone: spaces, marks and markup are the theme's affair."""
    return re.sub(r"[\W_]", "", text)


def _sentences(docstring: str) -> list[str]:
    """The paragraphs of a docstring; one without any is a trouble of its own."""
    return [part for part in docstring.split("\n\n") if part.strip()] or ["(no docstring)"]
