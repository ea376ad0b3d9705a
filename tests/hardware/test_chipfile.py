import dataclasses
import subprocess
import sys
from importlib import resources

import pytest
from hypothesis import given, strategies as st

from rooftrace.hardware.chip import Fact
from rooftrace.hardware.chipfile import (
    ChipFileError,
    available_chips,
    dump_chip,
    lint_chip,
    load_chip,
)
from rooftrace.hardware.chipfile.reading import UnknownChipError

pytestmark = pytest.mark.quick

H200 = resources.files("rooftrace.hardware").joinpath("chips/h200-sxm.toml").read_text("utf-8")
BF16 = 'precision = "bf16"\nrate = "989.4 TFLOP/s"'


@pytest.fixture
def edited(tmp_path):
    """The bundled H200 file with one text replaced by another."""

    def edit(old, new):
        assert old in H200
        path = tmp_path / "h200-sxm.toml"
        path.write_text(H200.replace(old, new, 1), encoding="utf-8")
        return path

    return edit


def message_of(path):
    with pytest.raises(ChipFileError) as error:
        load_chip(path)
    return str(error.value)


def test_a_chip_is_found_by_name_alias_device_name_path_and_itself(tmp_path):
    chip = load_chip("h200-sxm")
    path = tmp_path / "h200-sxm.toml"
    path.write_text(H200, encoding="utf-8")
    same = [load_chip("h200"), load_chip("NVIDIA H200"), load_chip(path), load_chip(str(path))]
    assert all(found == chip for found in [*same, load_chip(chip)])


def test_an_unknown_chip_is_quoted_with_a_guess():
    with pytest.raises(UnknownChipError) as error:
        load_chip("h2000")
    told = str(error.value)
    assert told.startswith("chip \"h2000\": did you mean 'h20' or 'h200-sxm'")
    assert "? Else expected a path ending in .toml or one of a10, a100" in told


def test_a_missing_file_is_quoted(tmp_path):
    assert "no such file" in message_of(tmp_path / "mine.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "cannot be read" in message_of(tmp_path / "folder.toml")


def test_a_wrong_unit_names_file_place_field_and_text(edited):
    path = edited(BF16, 'precision = "bf16"\nrate = "989 TFLOPS"')
    assert message_of(path) == (
        'h200-sxm.toml: [[peak]] #3: rate = "989 TFLOPS": '
        'expected a quantity in FLOP/s, for example "989 TFLOP/s"'
    )


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('value = "4.8 TB/s"', "value = 4.8e12", "[memory_bandwidth]: value = 4800000000000.0: "),
        (
            'value = "4.8 TB/s"',
            'value = "4.8 TB"',
            'value = "4.8 TB": expected a quantity in byte/s',
        ),
        ('value = "4.8 TB/s"\n', "", "[memory_bandwidth]: value is missing: expected a quantity"),
        (
            'value = "4.8 TB/s"\nkind = "datasheet"\nsource = "datasheet"',
            'value = "4.8 TB/s"\nkind = "datasheet"',
            "[memory_bandwidth]: source is missing: a number without a source does not load",
        ),
        (
            'value = "4.8 TB/s"\nkind = "datasheet"\nsource = "datasheet"',
            'value = "4.8 TB/s"\nkind = "datasheet"\nsource = "sheet"',
            'source = "sheet": expected a sentence, or a key of [sources], which has: datasheet',
        ),
        (
            'value = "4.8 TB/s"\nkind = "datasheet"',
            'value = "4.8 TB/s"\nkind = "rumour"',
            'kind = "rumour": expected one of datasheet, measured, derived, guess',
        ),
        ('kind = "gpu"', 'kind = "tpu"', 'kind = "tpu": expected one of gpu, cpu'),
        (
            'engine = "matrix"',
            'engine = "tensor"',
            '[[peak]] #1: engine = "tensor": expected one of',
        ),
        (BF16, BF16.replace("bf16", "bfloat"), 'precision "bfloat": expected one of'),
        (BF16, BF16.replace("bf16", "nvfp4"), 'expected the compute precision, "fp4"'),
        (BF16, BF16.replace("bf16", "tf32"), "[[peak]] #3: (matrix, tf32) stands already in"),
        (BF16, BF16.replace("989.4", "0"), "expected a rate above 0"),
        ("[power]\n", "[powr]\n", "unknown key powr: expected one of"),
        (BF16, BF16 + "\nspeed = 1", "[[peak]] #3: unknown key speed: expected one of"),
        ("[kernel_gap]", "[measured.kernel_gap]", "[kernel_gap] is missing: expected a section"),
        ('name = "h200-sxm"', "name = 200", "name = 200: expected a text"),
        ('name = "h200-sxm"\n', "", "h200-sxm.toml: name is missing: expected a text"),
        ("[memory_capacity]", "[[memory_capacity]]", "[memory_capacity]: expected a table"),
        ("[sources]", "[sources]\nx = 1", "[sources]: expected names with one text each"),
        ('name = "h200-sxm"', "name = ", "h200-sxm.toml: not a readable chip file"),
        ("aliases = [", "aliases = [1, ", "expected a list of texts"),
        ('name = "h200-sxm"', f"name = {'[' * 300}{']' * 300}", "more than 64 deep"),
        ('name = "h200-sxm"', f"name = {'[' * 5000}{']' * 5000}", "more than 64 deep"),
        ('name = "h200-sxm"', f"name = {'9' * 5000}", "not a readable chip file"),
        ('value = "4.8 TB/s"', 'value = "4.8e9999999999 TB/s"', "too large"),
    ],
)
def test_errors_quote_what_stands_there(edited, old, new, part):
    message = message_of(edited(old, new))
    assert message.startswith("h200-sxm.toml: ")
    assert part in message


def test_an_unknown_key_comes_with_a_guess(edited):
    assert "; did you mean 'power'?" in message_of(edited("[power]\n", "[powr]\n"))


@pytest.mark.parametrize("name", available_chips())
def test_a_dumped_chip_loads_back_equal(name, tmp_path):
    chip = load_chip(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(dump_chip(chip), encoding="utf-8")
    assert load_chip(path) == chip


@given(
    note=st.text(st.characters(codec="utf-8", exclude_categories=("Cs",))),
    key=st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1),
)
def test_any_text_survives_the_file(note, key, tmp_path_factory):
    fact = Fact.of("7 GB/s", "byte/s", "a measurement: " + note, "measured", note)
    chip = dataclasses.replace(load_chip("l4"), price=None, measured={key: fact}, title="t" + note)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(dump_chip(chip).encode())
    assert load_chip(path) == chip


def test_a_text_that_does_not_say_the_value_is_not_written():
    chip = load_chip("l4")
    wrong = dataclasses.replace(chip.memory_bandwidth, value=1.0)
    with pytest.raises(ChipFileError, match=r"text \"300 GB/s\" is 300000000000.0, but the value"):
        dump_chip(dataclasses.replace(chip, memory_bandwidth=wrong))


def warnings(path):
    """The first warning about each field."""
    found = [finding for finding in lint_chip(path) if finding.severity == "warning"]
    return {finding.field: finding for finding in reversed(found)}


@pytest.mark.parametrize(
    ("old", "new", "field", "part"),
    [
        (BF16, BF16.replace("989.4", "1978.9"), "matrix bf16", "equals the quoted 1978.9 TFLOP/s"),
        (BF16, BF16.replace("989.4", "1500"), "matrix bf16", "2:4 sparsity gives 2 x"),
        (
            'rate = "1978.9 TFLOP/s"\nquoted = "3957.8 TFLOP/s"',
            'rate = "3957.8 TFLOP/s"',
            "matrix fp8",
            "4.00 x bf16",
        ),
        ('"fp32"\nrate = "66.9', '"fp32"\nrate = "133.8', "vector fp32", "expected 64 or 128"),
        ('value = "700 W"', 'value = "700 mW"', "power", "expected 30 W to 4 kW"),
        ('value = "4.8 TB/s"', 'value = "4.8 GB/s"', "memory_bandwidth", "expected 100 GB/s to"),
        ('value = "60 MiB"', 'value = "60 GiB"', "l2_capacity", "of cache beside"),
        (
            'value = "143771 MiB"\nkind = "measured"',
            'value = "141 GB"\nkind = "datasheet"',
            "memory_capacity",
            'write "141 GiB"',
        ),
        (
            "[memory_bus]",
            '[memory_pin]\nvalue = "9 Gbit/s"\nkind = "guess"\nsource = "a slip"\n\n[memory_bus]',
            "memory_bandwidth",
            "6144 pins x 9 Gbit/s are 6912 GB/s",
        ),
        ('aliases = ["h200"', 'aliases = ["H 200"', "aliases", "expected lower case"),
        ('"vector"\nprecision = "fp32"', '"vector"\nprecision = "int32"', "peak", "vector fp32 is"),
        ('bandwidth = "450 GB/s"', 'bandwidth = "7.2 TB/s"', "link intra", "is it of all chips?"),
    ],
)
def test_lint_sees(edited, old, new, field, part):
    found = warnings(edited(old, new))
    assert field in found, found
    assert part in found[field].message
    assert str(found[field]).startswith(f"warning: {field}: ")


def test_lint_of_a_file_that_does_not_load_is_one_error(edited):
    (finding,) = lint_chip(edited('source = "datasheet"\n', ""))
    assert finding.severity == "error"
    assert "source is missing" in finding.message


def test_all_that_a_file_lacks_is_said_at_once(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "toy"\n[memory_capacity]\nvalue = "16 GB"\n'
        '[[peak]]\nengine = "matrix"\n[[link]]\n[memory_bandwith]\n'
    )
    facts = "memory_bandwidth kernel_gap"
    expected = [
        *(f"{key} is missing" for key in ("title", "vendor", "kind")),
        *(f"[memory_capacity]: {key} is missing" for key in ("source", "kind")),
        *(f"[{key}] is missing" for key in facts.split()),
        *(f"[[peak]] #1: {key} is missing" for key in ("precision", "rate", "source", "kind")),
        *(f"[[link]] #1: {key} is missing" for key in ("name", "bandwidth", "source", "kind")),
        "unknown key memory_bandwith",
    ]
    findings = lint_chip(path)
    for finding, part in zip(findings, expected, strict=True):
        assert finding.severity == "error" and finding.message.startswith(f"mine.toml: {part}")
    message = message_of(path)
    assert message.splitlines()[0] == "16 problems:" and len(message.splitlines()) == 17


def test_a_chip_file_of_another_name_is_asked_for_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(H200.replace('name = "h200-sxm"', 'name = "toy"'))
    (note,) = [finding for finding in lint_chip(path) if finding.field == "name"]
    assert note.severity == "note"
    assert note.message == (
        f'reports call this chip "toy"; ask for it by the path of its file, as in --chip {path}'
    )


def test_lint_notes_each_guess():
    notes = {finding.field for finding in lint_chip("h200") if finding.severity == "note"}
    assert "kernel_gap" in notes and "memory_bandwidth" not in notes


def test_importing_the_package_needs_neither_torch_nor_a_toml_reader():
    code = "import sys, rooftrace.hardware; print({'torch', 'tomllib', 'tomli'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
