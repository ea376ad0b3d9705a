"""Systems as data: what ships, what a file must have, and what an error says."""

from dataclasses import replace
from pathlib import Path

import pytest

from rooftrace.hardware import load_chip
from rooftrace.hardware.chipfile import FactFileError
from rooftrace.hardware.systems import (
    System,
    available_systems,
    dump_system,
    lint_system,
    load_system,
)
from rooftrace.hardware.systems.reading import SystemFileError, UnknownSystemError
from rooftrace.hardware.systems.records import SystemSizeError

pytestmark = pytest.mark.quick

SHIPPED = {
    "dgx-a100": ("a100-sxm-80", 8, 300e9, 8 * 25e9),
    "dgx-b200": ("b200-sxm", 8, 900e9, 8 * 50e9),
    "dgx-h100": ("h100-sxm", 8, 450e9, 8 * 50e9),
    "dgx-h200": ("h200-sxm", 8, 450e9, 8 * 50e9),
    "dgx-b300": ("b300-sxm", 8, 900e9, 8 * 100e9),
    "gb200-nvl72": ("gb200", 72, 900e9, 72 * 50e9),
    "gb300-nvl72": ("gb300", 72, 900e9, 72 * 100e9),
    "hgx-a100-4nic": ("a100-sxm-80", 8, 300e9, 4 * 12.5e9),
    "hgx-a800": ("a800-sxm-80", 8, 200e9, 8 * 25e9),
    "hgx-h20": ("h20", 8, 450e9, 8 * 50e9),
    "hgx-h800": ("h800-sxm", 8, 200e9, 8 * 50e9),
    "hgx-h100-4nic": ("h100-sxm", 8, 450e9, 4 * 50e9),
    "l40s-pcie": ("l40s", 8, 32e9, None),
    "mi325x-8": ("mi325x", 8, 448e9, 8 * 50e9),
    "mi355x-8": ("mi355x", 8, 537.6e9, 8 * 50e9),
    "workstation-2x4090": ("rtx-4090", 2, 32e9, None),
}
"""Chip, chips of a node, byte/s of a chip there, byte/s of a node's cards; by the data sheets."""

SMALL = """
name = "mine"
title = "Mine"
chip = "l4"
[sources]
sheet = "a data sheet"
[[level]]
name = "pcie"
kind = "pcie-shared"
size = 4
bandwidth = { value = "16 GB/s", kind = "datasheet", source = "sheet" }
latency = { value = "5 us", kind = "guess", source = "sheet" }
[[collective]]
library = "nccl"
op = "all_reduce"
level = "pcie"
alpha = "9 us"
step = "1 us"
efficiency = 0.5
p = 1.5
ranks = 4
nbytes = "64 MiB"
kind = "measured"
source = "sheet"
"""


def file(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_the_systems_that_ship_are_these() -> None:
    assert set(available_systems()) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_system_has_the_links_of_its_data_sheet(name: str) -> None:
    system = load_system(name)
    chip, per_node, inside, outside = SHIPPED[name]
    assert (system.chip.name, system.per_node) == (chip, per_node)
    assert system.levels[0].bandwidth.value == inside
    if outside is None:
        assert system.chips == per_node
        return
    nodes = system.levels[1]
    assert nodes.rate_of(per_node, per_node) == outside
    assert system.chips == 0  # as many nodes as are asked for


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_system_has_no_warnings(name: str) -> None:
    assert not [f for f in lint_system(name) if f.severity != "note"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_says_who_says_so(name: str) -> None:
    system = load_system(name)
    assert all(fact.source and fact.kind for _, fact in system.facts())
    fits = [(fit.source, fit.kind) for fit in system.collectives]
    assert all(source and kind for source, kind in fits)


def test_constants_of_a_relative_are_not_called_measured() -> None:
    assert {f.kind for f in load_system("dgx-h200").collectives} == {"derived"}
    assert {f.kind for f in load_system("workstation-2x4090").collectives} == {"derived"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_written_system_reads_back_equal(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.toml"
    dump_system(load_system(name), path)
    assert load_system(path) == load_system(name)


def test_a_system_is_found_by_alias_and_by_any_spelling() -> None:
    assert load_system("HGX_H100") is load_system("dgx-h100")
    assert load_system("nvl72").name == "gb200-nvl72"
    assert load_system(load_system("dgx-a100")).name == "dgx-a100"


def test_a_wrong_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(UnknownSystemError, match="did you mean 'dgx-h100'"):
        load_system("dgx-h10")
    with pytest.raises(UnknownSystemError, match="is a chip, and a system joins some"):
        load_system("l4")
    with pytest.raises(SystemFileError, match="no such file"):
        load_system("nothing.toml")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('chip = "l4"', 'chip = "l44"', 'chip = "l44": .*did you mean'),
        ("size = 4", "size = 0", "size = 0: expected a whole number above 0"),
        ('"16 GB/s"', '"16 Gb/s"', '"16 Gb/s": expected a quantity in byte/s'),
        ('"16 GB/s"', '"0 GB/s"', "expected more than 0"),
        ('"pcie-shared"', '"pci"', 'kind = "pci": expected one of nvswitch'),
        ("efficiency = 0.5", "efficiency = 50", "efficiency = 50: expected a number from"),
        ("efficiency = 0.5", "", 'efficiency = "": expected a number from'),
        ("p = 1.5", "p = 1.5\nq = 2", "unknown key q"),
        ('op = "all_reduce"', 'op = "allreduce"', 'op = "allreduce": expected one of all_reduce'),
        ('level = "pcie"', 'level = "pci"', "did you mean 'pcie'"),
        ('source = "sheet"\n', "\n", "source is missing"),
        ("latency = {", "latenz = {", "latency is missing"),
        ("ranks = 4", "ranks = true", "ranks = true: expected a whole number"),
        ('alpha = "9 us"', "alpha = 9", "alpha = 9: expected a text with a unit"),
    ],
)
def test_a_mistake_is_quoted_with_its_place(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in SMALL
    with pytest.raises(FactFileError, match=said) as error:
        load_system(file(tmp_path, SMALL.replace(old, new)))
    assert isinstance(error.value, SystemFileError)
    assert "mine.toml" in str(error.value)


def test_two_tables_of_one_op_are_refused(tmp_path: Path) -> None:
    twice = SMALL + SMALL[SMALL.index("[[collective]]") :]
    with pytest.raises(SystemFileError, match=r"stands already in \[\[collective\]\] #1"):
        load_system(file(tmp_path, twice))


def test_only_the_outermost_level_may_be_open(tmp_path: Path) -> None:
    level = SMALL[SMALL.index("[[level]]") : SMALL.index("[[collective]]")]
    outer = level.replace('"pcie"', '"network"')
    text = SMALL.replace("size = 4", "").replace("[[collective]]", outer + "[[collective]]")
    with pytest.raises(SystemFileError, match="size is missing: only the outermost may be open"):
        load_system(file(tmp_path, text))


def test_a_fact_that_no_system_has_is_remarked(tmp_path: Path) -> None:
    path = file(tmp_path, SMALL.replace('"16 GB/s"', '"16 TB/s"'))
    assert any("more than the memory's" in f.message for f in lint_system(path))
    assert lint_system(file(tmp_path, "name = 1"))[0].severity == "error"


def test_ranks_fill_a_node_before_the_next() -> None:
    system = load_system("dgx-h100")
    assert system.units_of(range(8)) == (1, 1)
    assert system.units_of(range(16)) == (2, 1)
    assert system.units_of([0, 8, 16, 24]) == (4, 1)
    assert load_system("gb200-nvl72").units_of(range(72)) == (1, 1)


def test_a_rank_without_a_chip_is_refused() -> None:
    with pytest.raises(SystemSizeError, match="rank 8: l40s-pcie has 8 chips"):
        load_system("l40s-pcie").units_of(range(9))


def test_chips_that_share_cards_have_less_each() -> None:
    full, half = load_system("dgx-h100").levels[1], load_system("hgx-h100-4nic").levels[1]
    assert full.rate_of(1, 8) == 50e9  # a card of its own
    assert half.rate_of(1, 8) == 25e9  # two chips, one card
    assert full.rate_of(8, 8) == 2 * half.rate_of(8, 8)
    tapered = replace(full, oversubscription=replace(full.bandwidth, value=4.0))
    assert tapered.rate_of(8, 8) == full.rate_of(8, 8) / 4


def test_a_chip_alone_is_a_system_of_one_level_that_says_so() -> None:
    chip = load_chip("h100-sxm")
    system = System.of_chip(chip)
    assert system.bare and not system.collectives
    assert [level.name for level in system.levels] == ["intra"]
    assert system.units_of(range(1000)) == (1,)
    link = chip.link("intra")
    assert link is not None and system.levels[0].bandwidth == link.bandwidth


def test_a_chip_without_links_joins_nothing() -> None:
    alone = System.of_chip(replace(load_chip("h100-sxm"), links=()))
    assert alone.units_of([0]) == ()
    with pytest.raises(SystemSizeError, match="no link between chips"):
        alone.units_of([0, 1])
