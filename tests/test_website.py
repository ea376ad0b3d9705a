"""The site, without what builds it: navigation, blocks, links, public names and gallery."""

from __future__ import annotations

import collections
from operator import attrgetter
from pathlib import Path

import pytest

import rooftrace
from docsite import checks, gallery, links, pages, reference

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = collections.Counter(pages.listed(pages.settings()["nav"]))
    made = {*pages.sources().values(), *pages.examples().values(), "reference/index.md"}
    assert set(listed) == made
    assert {page for page, times in listed.items() if times > 1} == set()


@pytest.mark.parametrize("source", pages.sources())
def test_every_link_of_a_page_resolves(source: str) -> None:
    text = pages.text_of(source, pages.resolver())
    places = {*pages.sources().values(), *pages.examples().values(), "reference/index.md"}
    above = Path(pages.sources()[source]).parent
    for link in links.links_of(text):
        if link.leads_out or not link.path or link.image:
            continue
        parts: list[str] = []
        for part in (above / link.path).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        assert "/".join(parts) in places, f"{source}:{link.line} {link.target}"


@pytest.mark.parametrize("source", pages.sources())
def test_every_block_of_a_page_runs_is_read_or_is_output(source: str) -> None:
    assert list(checks.blocks((ROOT / source).read_text(encoding="utf-8"))) == []


def test_every_command_in_a_text_of_the_code_is_read() -> None:
    files = [path for folder in ("rooftrace", "examples") for path in (ROOT / folder).rglob("*.py")]
    lines = [line.strip() for path in files for line in path.read_text("utf-8").splitlines()]
    named = tuple(f"rooftrace {name} " for name in checks.cli.commands)
    told = [line for line in lines if line.startswith(named)]
    checks.READ["sh"]("\n".join(told))
    assert len(told) >= 3


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("```\n1\n```", "2: a block without a language"),
        ("\n    indented", "3: a block without a language"),
        ("- item\n\n    more of it", ""),
        ("```python\n```\n\nSo:\n\n```text\n1\n```", "7: `text` is what `python` just above"),
        ("```python\n```\n```text\n1\n```", "4: `text` is what `python` just above prints"),
        ("```bash\nls\n```", "2: 'bash' is no language of a block"),
        ("```toml\na = \n```", "2: Invalid value"),
        ("```py\nx = (\n```", "2: '(' was never closed"),
        ("```sh\nls && rooftrace reprot gpt2\n```", "2: rooftrace reprot gpt2: 'reprot'"),
        ("```sh\nrooftrace trace a \\\n --ships b\n```", "2: rooftrace trace a   --ships b: No"),
        ("```console\n$ rooftrace chips list --x\n```", "2: rooftrace chips list --x: No such"),
        ("```console\nrooftrace as a program prints it\n```", ""),
        ("```diagram\n+--+\n```", ""),
    ],
)
def test_a_block_that_nothing_checks_is_refused_with_its_line(block: str, told: str) -> None:
    found = list(checks.blocks(f"Text.\n{block}\n"))
    assert [each[: len(told)] for each in found] == [told] * bool(told)


def test_links_into_the_repository_are_addresses_or_paths() -> None:
    resolve = pages.resolver()
    web = links.Resolver(ROOT, resolve.pages, resolve.assets, "https://example.org/blob/main/")
    text = "[its schema](../rooftrace/errors.py), [errors.py](../rooftrace/errors.py#x), `[a](b)`"
    assert resolve.on_site(text, "docs/report.md") == (
        "its schema (`rooftrace/errors.py`), `rooftrace/errors.py`, `[a](b)`"
    )
    assert web.on_site(text, "docs/report.md").startswith(
        "[its schema](https://example.org/blob/main/rooftrace/errors.py), "
    )


def test_links_between_files_are_links_between_pages() -> None:
    resolve = pages.resolver()
    text = "[a](docs/sweep.md), [b](CHANGELOG.md), [c](examples/04_diff.py), [d](https://x.org)"
    assert resolve.on_site(text, "README.md") == (
        "[a](sweep.md), [b](changelog.md), [c](examples/04_diff.md), [d](https://x.org)"
    )
    assert resolve.on_site("[r](../../docs/fusion.md#the-joins)", "benchmarks/inductor/README.md")
    assert resolve.on_site("![p](accuracy/own.png)", "docs/accuracy.md") == (
        "![p](accuracy/own.png)"
    )


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("gone.md", r"docs/sweep\.md:3 links gone\.md: there is no docs/gone\.md"),
        ("solve.md#gone", r"links solve\.md#gone: docs/solve\.md has no heading #gone"),
        ("../../outside", r"links \.\./\.\./outside: there is no \.\./outside"),
    ],
)
def test_a_broken_link_is_refused_with_its_line(link: str, told: str) -> None:
    with pytest.raises(links.BrokenLinkError, match=told):
        pages.resolver().on_site(f"# Title\n\n[text]({link})\n", "docs/sweep.md")


def test_code_holds_no_links_and_no_headings() -> None:
    text = "# A b\n\n```\n# No\n[x](y)\n```\n\n## A b\n\n### `Code` & [more](z.md)\n"
    assert links.anchors_of(text) == {"a-b", "a-b-1", "code--more"}
    assert [link.target for link in links.links_of(text)] == ["z.md"]


def test_the_address_of_the_repository_is_that_of_pyproject() -> None:
    assert pages.web_address({"urls": {"Source": "https://example.org/r/"}}) == (
        "https://example.org/r/blob/main/"
    )
    assert pages.web_address({"urls": {"Homepage": "https://example.org"}}) == ""


def test_every_public_name_has_a_page_in_one_group() -> None:
    names = [name for group in reference.grouped().values() for name in group]
    rooms = ("extend", "tools", "types")
    modules = [rooftrace, *(getattr(rooftrace, name) for name in rooms)]
    public = [name for module in modules for name in module.__all__]
    assert sorted(names) == sorted(set(public) - {*rooms})
    assert len(names) == len(set(names))
    assert len({reference.page_of(name).lower() for name in names}) == len(names)


def test_docstrings_are_read_where_python_reads_them() -> None:
    for name, public in reference.public_names().items():
        text = attrgetter(public.path)(rooftrace).__doc__ or ""
        read = reference.docstring(public.module, public.inside) or ""
        assert read.split() == text.split(), name
        assert read, f"rooftrace.{name} has no docstring"


def test_the_list_of_the_gallery_is_that_of_its_scripts() -> None:
    page = (ROOT / pages.GALLERY).read_text(encoding="utf-8")
    wanted = gallery.with_list(page, gallery.as_list(gallery.entries()))
    assert page == wanted, "run `make golden`"


def test_a_script_of_the_gallery_makes_what_its_docstring_names(tmp_path: Path) -> None:
    """One that is quick; `make docs` runs them all."""
    each = gallery.entry(gallery.FOLDER / "05_effects.py")
    gallery.draw(each, tmp_path)
    (picture,) = tmp_path.iterdir()
    assert picture.name == "effects.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    section = gallery.section(each, tmp_path, "gallery/effects")
    assert "![effects.png](gallery/effects/effects.png)" in section
    assert "rt.sensitivity(" in section and '"""' not in section


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1\n", "expected a docstring"),
        ('"""Title."""\n', "names no picture"),
        ('"""Title.\n\nNo file here.\n"""\n', "'No file here.': expected a picture's file"),
        (
            '"""Title.\n\na.png: Look.\n"""\nopen("b.png", "w").close()\n',
            "did not make a.png, but b",
        ),
    ],
)
def test_a_script_that_the_gallery_cannot_use_is_refused(
    text: str, told: str, tmp_path: Path
) -> None:
    script = tmp_path / "01_script.py"
    script.write_text(text)
    with pytest.raises(gallery.GalleryError, match=rf"01_script\.py.*{told}"):
        gallery.draw(gallery.entry(script), tmp_path / "out")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A small site in which all is well, but for the pages of the public names."""
    (tmp_path / "index.html").write_text('<a href="b.html#here">b</a><img src="p.png">')
    (tmp_path / "b.html").write_text('<h2 id="here">x</h2><a href="https://example.org">out</a>')
    (tmp_path / "p.png").write_bytes(b"")
    return tmp_path


def said(site: Path) -> list[str]:
    return [trouble for trouble in checks.troubles(site) if "rooftrace." not in trouble]


def test_a_site_that_is_whole_passes(site: Path) -> None:
    assert said(site) == []
    assert said(site / "none") == [f"{site / 'none'}: no page"]


@pytest.mark.parametrize(
    ("html", "trouble"),
    [
        ('<script src="https://x.org/a.js"></script>', "a.html loads https://x.org/a.js"),
        ('<link rel="stylesheet" href="//x.org/a.css">', "a.html loads //x.org/a.css"),
        ('<a href="b.html#gone">b</a>', "a.html links b.html#gone: there is no such place"),
        ('<a href="gone.html">b</a>', "a.html links gone.html: there is no such file"),
        ('<img src="gone.png">', "a.html links gone.png: there is no such file"),
        ('<a href="../index.html">b</a>', "a.html links ../index.html: there is no such file"),
    ],
)
def test_what_leads_out_of_a_site_or_nowhere_is_seen(site: Path, html: str, trouble: str) -> None:
    (site / "a.html").write_text(html)
    assert said(site) == [trouble]


def test_a_style_that_loads_from_elsewhere_is_seen(site: Path) -> None:
    (site / "a.css").write_text("@font-face { src: url('https://x.org/a.woff') }")
    assert said(site) == ["a.css loads https://x.org/a.woff"]


def test_a_name_without_its_page_docstring_or_types_is_seen(site: Path) -> None:
    page = (site / reference.page_of("available_chips")).with_suffix(".html")
    page.parent.mkdir(parents=True)
    page.write_text("<p>nothing</p>")
    about = [each for each in checks.troubles(site) if "available_chips" in each]
    assert any("does not say" in each for each in about)
    assert any("does not show the type" in each for each in about)
    assert "rooftrace.trace has no page" in checks.troubles(site)


def test_the_site_loads_no_font_and_brings_its_own_script_for_the_search() -> None:
    settings = pages.settings()
    assert settings["theme"]["font"] is False and settings["strict"] is True
    for file in [*settings["extra"]["polyfills"], *settings["extra_css"]]:
        text = (ROOT / "site" / file).read_text(encoding="utf-8")
        assert "//" not in text.replace("// ", "")
    # The offline plugin adds one of the network unless a name has these words.
    assert any("iframe-worker" in file for file in settings["extra"]["polyfills"])


def test_signs_in_a_docstring_are_no_markup() -> None:
    pytest.importorskip("griffe")
    from docsite import docstrings

    text = "timeline_<phase>.gz and `a_<b>`, *args\n\n    code_<x>"
    assert (
        docstrings.literal(text) == "timeline\\_\\<phase>.gz and `a_<b>`, \\*args\n\n    code_<x>"
    )


def test_a_function_that_a_stub_holds_as_overloads_is_read(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe")
    from docsite import docstrings

    (tmp_path / "stubbed.py").write_text("")
    (tmp_path / "stubbed.pyi").write_text(
        "from typing import overload\n"
        "@overload\ndef add(x: int) -> int: ...\n"
        '@overload\ndef add(x: str) -> str:\n    """A sum."""\n'
    )
    extensions = griffe.load_extensions(docstrings.Prose())
    module = griffe.load("stubbed", search_paths=[tmp_path], extensions=extensions)
    assert module["add"].docstring.value == "A sum."
    assert [str(each.returns) for each in module["add"].overloads] == ["int", "str"]
