"""Hosts: their files, and the facts of a chip that are its host's."""

import pytest
import torch

import rooftrace as rt
from rooftrace.hardware import available_hosts, load_chip, load_host
from rooftrace.hardware.chip import HOST_FACTS, Fact
from rooftrace.hardware.chipfile import dump_chip
from rooftrace.hardware.chipfile.reading import HostFileError, UnknownHostError

pytestmark = pytest.mark.quick


@pytest.fixture
def own(tmp_path):
    """A host file that states one fact."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\ntitle = "Mine"\n[dispatch_eager]\nvalue = "4 us"\nkind = "measured"\n'
        'source = "a loop over tiny ops"\n'
    )
    return path


@pytest.mark.parametrize("name", available_hosts())
def test_a_bundled_host_has_every_fact_with_a_source(name):
    host = load_host(name)
    assert host.name == name and tuple(sorted(host.facts)) == tuple(sorted(HOST_FACTS))
    assert all(len(fact.source) > 15 for fact in host.facts.values())
    assert 0 < host.spread.value < 1


def test_a_host_has_many_names(own):
    assert load_host("Server") is load_host("typical") is load_host(load_host("usual"))
    assert load_host(str(own)).name == load_host(own).name == "mine"
    with pytest.raises(UnknownHostError, match="torchscript, typical; did you mean 'typical'"):
        load_host("typicl")
    with pytest.raises(UnknownHostError, match="host 3: expected a name, path or Host"):
        load_host(3)
    with pytest.raises(HostFileError, match=r'host "none\.toml": no such file'):
        load_host("none.toml")


def test_a_file_says_all_that_is_wrong_with_it(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(
        'name = "b"\ntitle = "B"\nclock = 3\n[spread]\nvalue = "50 %"\nkind = "guess"\n'
    )
    with pytest.raises(HostFileError, match=r"2 problems:(.|\n)*source is missing(.|\n)*key clock"):
        load_host(path)


def test_what_a_file_leaves_out_is_typical_at_the_pace_of_its_dispatch(own):
    host, usual = load_host(own), load_host("typical")
    assert host.facts["module_call"].value == pytest.approx(usual.facts["module_call"].value / 2)
    assert host.facts["graph_launch"] is usual.facts["graph_launch"]


def test_a_chip_without_facts_of_a_host_has_the_typical_ones():
    chip = load_chip("h200-sxm")
    assert {name: getattr(chip, name) for name in HOST_FACTS} == load_host("typical").facts


def test_a_chip_file_is_right_about_its_host_unless_another_is_named(tmp_path, step):
    path = tmp_path / "slow.toml"
    dispatch = Fact.of("40 us", "second", "a loop over tiny ops", "measured")
    path.write_text(dump_chip(load_chip("h200-sxm").with_facts({"dispatch_eager": dispatch})))
    assert load_chip(path).dispatch_eager.value == 40e-6
    own = rt.estimate(step, chip=path, execution="eager")
    named = rt.estimate(step, chip=path, execution="eager", host="typical")
    assert named.t_est == rt.estimate(step, chip="h200-sxm", execution="eager").t_est
    assert own.t_est > 3 * named.t_est
    assert load_host(path).facts["dispatch_eager"].value == 40e-6  # a chip file is a host file, too


@pytest.fixture(scope="module")
def step():
    """Thirty small products under modules: the host takes longer than any GPU."""
    layers = (torch.nn.Linear(8, 8, device="meta") for _ in range(30))
    return rt.trace(torch.nn.Sequential(*layers), torch.empty(8, 8, device="meta"))


def test_a_host_bounds_small_steps_and_its_name_is_one_argument_everywhere(step, own):
    times = {}
    for host in (None, "typical", "desktop", "torchscript", str(own), load_host(own)):
        found = rt.estimate(step, chip="h200-sxm", execution="eager", host=host)
        assert found.times.regime == "launch" == found.times.cell.limit
        times[str(host)] = found.t_est
    assert times["None"] == times["typical"] > times["desktop"]
    assert times["torchscript"] < times["typical"]
    planned = rt.plan(step, "eager")
    assert rt.estimate(planned, "h200-sxm", host="desktop").t_est == times["desktop"]


def test_a_sweep_and_an_estimate_agree_about_a_host():
    module, x = torch.nn.Linear(8, 8, device="meta"), torch.empty(8, 8, device="meta")
    how = {"chip": "h200-sxm", "execution": "eager", "host": "desktop"}
    swept = rt.sweep(module, x, over={"0.0": range(1, 9)}, **how).frame()
    alone = rt.estimate(module, x, **how)
    assert list(swept[swept["0.0"] == 8]["t_est"]) == [pytest.approx(alone.t_est, rel=1e-12)]
