"""The pages of the site: which file of the repository each is made of, in the reader's order."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docsite import notebooks
from docsite.links import Resolver

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "site" / "mkdocs.yml"
ASSETS = {"docs/accuracy": "accuracy", "tests/golden": "golden"}
GALLERY = "docs/gallery.md"


def sources(root: Path = ROOT) -> dict[str, str]:
    """{file of the repository: page of the site} of every page that is a Markdown file there."""
    pages = {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
    }
    pages |= {f"docs/{path.name}": path.name for path in sorted((root / "docs").glob("*.md"))}
    for path in sorted((root / "benchmarks").glob("*/README.md")):
        pages[path.relative_to(root).as_posix()] = f"benchmarks/{path.parent.name}.md"
    return pages


def examples() -> dict[str, str]:
    """{script: page} of the examples, which are shown as notebooks that ran."""
    return {f"examples/{path.name}": f"examples/{path.stem}.md" for path in notebooks.scripts()}


def web_address(project: dict[str, Any]) -> str:
    """Where files of the repository stand on the web, by pyproject.toml; "" if it does not say."""
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    for name in ("source", "repository", "source code", "github"):
        if name in urls:
            return f"{urls[name].rstrip('/')}/blob/main/"
    return ""


def resolver(root: Path = ROOT) -> Resolver:
    """What turns links between files of the repository into links of the site."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return Resolver(root, {**sources(root), **examples()}, ASSETS, web_address(project))


def settings() -> dict[str, Any]:
    """What stands in mkdocs.yml."""
    import yaml

    read: dict[str, Any] = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    return read


def listed(nav: list[Any]) -> Iterator[str]:
    """Every page of a navigation, as often as it stands there."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from listed(value) if isinstance(value, list) else [value]


def text_of(source: str, resolve: Resolver) -> str:
    """The Markdown of the page made of a file: links of the site, no comments for programs."""
    text = (resolve.root / source).read_text(encoding="utf-8")
    text = re.sub(r"^<!-- golden: .*? -->\n", "", text, flags=re.MULTILINE)
    if not re.match(r"# ", text):  # a page without a heading is called by its folder
        text = f"# {Path(source).parent.name.capitalize()}\n\n{text}"
    return resolve.on_site(text, source)
