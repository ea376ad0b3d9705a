"""A page of HTML that a person explores: one file that needs no network and opens from disk.

What a result says stands in it as plain HTML, so that it is read, searched and printed without a
script.  A script of its own sorts tables and, for a report, draws what can be explored.  A policy
in the file lets no other script run, and nothing be loaded, whatever a name in the result says.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from rooftrace._escapes import to_json
from rooftrace._outputs import MARK
from rooftrace.reporting.figures import style
from rooftrace.reporting.hypertext.body import Hypertext, as_hypertext, escaped
from rooftrace.reporting.view.model import Image, Section, View

if TYPE_CHECKING:
    from rooftrace.reporting.sections import Results

_EXPLORER = """<div id="explorer">
<noscript><p>What can be explored needs JavaScript; all tables stand below.</p></noscript>
</div>"""


def report_page(results: Results) -> str:
    """The page of a report, with what its script draws from."""
    from rooftrace.reporting.hypertext.contents import contents
    from rooftrace.reporting.sections import report_view

    plain = report_view(results, "page")
    explore = Section(title="Explore", parts=[Image("explorer")])  # the page lists its contents
    sections = tuple(explore if part.contents else part for part in plain.sections)
    data = to_json(contents(results)).decode().replace("<", "\\u003c")  # so that it ends no element
    island = f'<script type="application/json" id="contents">{data}</script>'
    written = as_hypertext(replace(plain, sections=sections), {"explorer": _EXPLORER})
    return _page(plain.title, replace(written, body=f"{written.body}\n{island}"))


def result_page(view: View, pictures: Mapping[str, bytes] | None = None) -> str:
    """The page of any other result: its tables are sorted and filtered.

    pictures: PNGs by the names of the images that show them.
    """
    figures = {name: _picture(name, png) for name, png in (pictures or {}).items()}
    return _page(view.title or "rooftrace", as_hypertext(view, figures))


def _picture(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{escaped(name)}" style="max-width:100%" src="data:image/png;base64,{data}"/>'


def _page(name: str, written: Hypertext) -> str:
    script, styles = _part("page.js"), _part("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = escaped(name)
    links = [f'<li><a href="#{place}">{escaped(text)}</a></li>' for place, text in written.headings]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{MARK}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{styles}\n{_tones()}</style>\n</head>\n<body>\n"
        f'<header><h1>{title}</h1><div id="theme"></div></header>\n'
        f'<nav class="contents" aria-label="contents"><ul>{"".join(links)}</ul></nav>\n'
        f"<main>\n{written.body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


@cache
def _part(name: str) -> str:
    """A file that comes along with this module."""
    return files("rooftrace.reporting.hypertext").joinpath(name).read_text(encoding="utf-8")


@cache
def _tones() -> str:
    """The colours of families, limiters and kinds of bytes, as variables and classes."""
    lines = []
    for group, colours in (
        ("family", style.FAMILIES),
        ("limit", style.REGIMES),
        ("kind", style.KINDS),
    ):
        for name, colour in colours.items():
            label = f"{group}-{name.replace(' ', '-')}"
            lines.append(
                f":root{{--{label}:light-dark({colour},{style.on_dark(colour)})}}\n"
                f".{label}{{--tone:var(--{label})}}"
            )
    lines.append(".swatch,.limits span{background:var(--tone,#999)}")
    return "\n".join(lines) + "\n"
