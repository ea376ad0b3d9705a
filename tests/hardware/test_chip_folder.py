"""A folder of chips in which one file is wrong: the others are none the worse for it."""

import shutil
from importlib import resources
from pathlib import Path

import pytest

from rooftrace.hardware.chipfile import (
    ChipFileError,
    lint_chip,
    load_chip,
    reading,
)
from rooftrace.hardware.chipfile.reading import UnknownChipError
from tests.reporting.conftest import run

__all__ = ["run"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the bundled chips, to which files can be added."""
    caches = (reading._bundled, reading.bundled_aliases)
    source = resources.files("rooftrace.hardware").joinpath("chips")
    copy = tmp_path / "chips"
    shutil.copytree(Path(str(source)), copy)

    def files() -> dict[str, Path]:
        return {path.stem: path for path in copy.glob("*.toml")}

    monkeypatch.setattr(reading, "chip_files", files)
    for cache in caches:
        cache.cache_clear()
    yield copy
    for cache in caches:
        cache.cache_clear()


def add(folder, name, *replaced):
    text = (folder / "h200-sxm.toml").read_text("utf-8")
    for old, new in (('name = "h200-sxm"', f'name = "{name}"'), *replaced):
        assert old in text
        text = text.replace(old, new, 1)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name = ", "zz.toml: not a readable chip file"),
        ("sources = 3", "zz.toml: [sources]: expected names with one text each"),
    ],
)
def test_a_bad_file_is_named_alone(folder, run, text, part):
    (folder / "zz.toml").write_text(text)
    assert load_chip("a100-sxm-80").name == load_chip("a100").name == "a100-sxm-80"
    with pytest.raises(ChipFileError, match=r"zz\.toml"):
        load_chip("zz")
    linted = run("chips", "lint")
    assert linted.code == 1
    bad = [line for line in linted.out.splitlines() if not line.endswith(": ok")]
    assert bad[0] == "zz: 1 problem" and len(bad) == 2 and part in bad[1]
    listed = run("chips", "list").out
    assert "mi300x" in listed and "not listed: zz.toml" in listed


def test_of_several_mistakes_the_list_of_chips_has_the_first_and_lint_has_all(folder, run):
    (folder / "zz.toml").write_text('name = "zz"')
    listed = run("chips", "list").out
    assert "not listed: zz.toml: title is missing: expected a text (and 5 more" in listed
    linted = run("chips", "lint", "zz").out
    assert linted.startswith("zz: 6 problems\n") and len(linted.splitlines()) == 7


def test_a_bad_value_is_named_with_its_file_and_key(folder):
    add(folder, "zz", ('engine = "matrix"', 'engine = "matix"'))
    (finding,) = lint_chip("zz")
    assert finding.message.startswith('zz.toml: [[peak]] #1: engine = "matix": expected one of')
    assert [f for f in lint_chip("h100-sxm") if f.severity != "note"] == []


def test_an_unknown_name_says_which_file_was_not_read_for_it(folder):
    (folder / "zz.toml").write_text("name = ")
    with pytest.raises(UnknownChipError, match=r"\(Not read for aliases: zz.toml.\)"):
        load_chip("nothing-like-it")


def test_an_alias_of_two_chips_is_an_error_of_both(folder):
    add(folder, "zz")
    assert load_chip("h200-sxm").name == "h200-sxm" and load_chip("zz").name == "zz"
    with pytest.raises(ChipFileError, match='"h200": an alias of h200-sxm and of zz; name one'):
        load_chip("h200")
    for name, other in (("zz", "h200-sxm"), ("h200-sxm", "zz")):
        clashes = {f.message for f in lint_chip(name) if f.severity == "error"}
        assert f'"h200" is an alias of {other} too ({other}.toml)' in clashes
    assert [f for f in lint_chip("h100-sxm") if f.severity != "note"] == []


def test_an_alias_that_is_the_name_of_another_chip_is_an_error(folder):
    text = (folder / "h200-sxm.toml").read_text("utf-8")
    first = text.index("aliases = [") + len("aliases = [")
    (folder / "h200-sxm.toml").write_text(text[:first] + '"l4", ' + text[first:], "utf-8")
    assert load_chip("l4").name == "l4"
    errors = [f.message for f in lint_chip("h200-sxm") if f.severity == "error"]
    assert errors == ['"l4" is the name of l4 too (l4.toml)']


def test_a_file_whose_chip_has_another_name_is_an_error(folder):
    (folder / "zz.toml").write_text((folder / "l4.toml").read_text("utf-8"), "utf-8")
    messages = [str(finding) for finding in lint_chip("zz")]
    assert any("a chip is found by the name of its file" in text for text in messages)
    assert any("l4 too (l4.toml)" in text for text in messages)
    assert not any("of zz too" in text for text in messages)


def test_a_name_with_capitals_is_found_and_stops_no_list(folder, run):
    add(folder, "Upper_Case")
    assert load_chip("Upper_Case") is load_chip("upper-case")
    assert load_chip("Upper_Case").name == "Upper_Case"
    assert run("chips", "list").code == 0


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "no text"])
def test_a_file_that_cannot_be_read_is_named_and_stops_no_other(folder, run, kind):
    bad = folder / "zz.toml"
    if kind == "folder":
        bad.mkdir()
    elif kind == "no text":
        bad.write_bytes(b'name = "\xff"')
    else:
        bad.symlink_to(folder / "nowhere")
    with pytest.raises(ChipFileError, match=r"zz\.toml: (cannot be read|not a readable)"):
        load_chip("zz")
    assert load_chip("h200").name == "h200-sxm"
    listed = run("chips", "list")
    assert listed.code == 0 and "not listed: zz.toml: " in listed.out
    linted = run("chips", "lint")
    assert linted.code == 1 and "zz: 1 problem" in linted.out
    assert "h200-sxm: ok" in linted.out
