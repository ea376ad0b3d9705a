"""Exported programs in files: the same costs as the module's own, and no code of the file runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.tracer.targets.ptfile import ExpressionError, checked, evaluated
from tests.reporting.conftest import Run, run  # noqa: F401  the fixture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, 10)
        self.register_buffer("scale", torch.arange(10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.head(x.flatten(1)) * self.scale


Made = tuple[nn.Module, torch.Tensor, Path]


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A module, its argument, and a file of its program."""
    model, x = Net().eval(), torch.zeros(2, 3, 8, 8)
    path = tmp_path_factory.mktemp("cnn") / "cnn.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    return model, x, path


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The same of a layer of attention, with dimensions that may change."""
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x, path = torch.zeros(2, 16, 32), tmp_path_factory.mktemp("layer") / "layer.pt2"
    sizes = {"src": {0: torch.export.Dim("b", max=64), 1: torch.export.Dim("s", max=512)}}
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=sizes), path)
    return model, x, path


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_file_costs_what_its_module_costs(name: str, request: pytest.FixtureRequest) -> None:
    model, x, path = request.getfixturevalue(name)
    ours = rt.estimate(model, x, phase="forward", chip="l4")
    there = rt.estimate(path, phase="forward", chip="l4")
    assert there.flops == ours.flops > 0
    assert there.bytes.weights == ours.bytes.weights
    assert there.graph.model["params"] == sum(p.numel() for p in model.parameters())
    # Its own counter, which knows neither of us.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted, torch.no_grad():
        torch.export.load(path).module()(x)
    products = sum(op.flops_torch or 0 for op in there.graph.ops)
    assert products == counted.get_total_flops() > 0


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_file_costs_what_its_program_in_memory_costs(
    name: str, request: pytest.FixtureRequest
) -> None:
    _, x, path = request.getfixturevalue(name)
    ours = rt.estimate(torch.export.load(path), x, phase="training", chip="l4")
    there = rt.estimate(path, phase="training", chip="l4")
    assert (there.flops, there.bytes_hbm) == (ours.flops, ours.bytes_hbm)


def test_dynamic_dimensions_take_sizes_and_say_their_range(transformer: Made) -> None:
    model, _, path = transformer
    ours = rt.estimate(model, torch.zeros(8, 128, 32), chip="l4", phase="forward")
    assert rt.estimate(path, batch=8, seq=128, chip="l4", phase="forward").flops == ours.flops
    described = rt.estimate(path, inputs={"src": "8,128,32"}, chip="l4", phase="forward")
    assert described.flops == ours.flops
    for asked, words in (
        ({"batch": 80}, "takes .* to 64"),
        ({"inputs": {"src": "2,3,31"}}, r"src\[.*, 32\]; numbers are fixed"),
        ({"inputs": {"scr": "2,3,32"}}, "did you mean 'src'"),
        ({"kv": 8}, "kv=8"),
        ({"batch": 8, "inputs": {"src": "2,3,32"}}, "an --input makes it 2"),
    ):
        with pytest.raises(rt.types.RequestError, match=words):
            rt.trace(path, phase="forward", **asked)


def test_fixed_dimensions_are_named(cnn: Made) -> None:
    path = cnn[2]
    with pytest.raises(
        rt.types.RequestError, match=r"x\[2, 3, 8, 8\], in which dimension 0 is fixed"
    ):
        rt.trace(path, batch=4, phase="forward")
    assert rt.trace(path, batch=2, phase="forward").ops


def test_the_command_line_takes_a_file(run: Run, cnn: Made, tmp_path: Path) -> None:  # noqa: F811
    path = cnn[2]
    ran = run("report", path, "--phase", "forward", "--out", "-", "--format", "json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["model"]["params"] == sum(p.numel() for p in Net().parameters())
    missing = run("report", tmp_path / "none.pt2")
    assert missing.code == 2 and "there is no such file" in missing.err


def test_weights_are_not_made(cnn: Made) -> None:
    from rooftrace.tracer.targets.ptfile import read_program

    program = read_program(cnn[2])
    assert all(p.is_meta for _, p in program.named_parameters())
    assert program.state_dict["scale"].tolist() == list(range(10))  # small, and may decide


# -- files that would act ------------------------------------------------------------------------


class Acts:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("ACTED",))


def changed(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A copy of an archive with other entries, beside it."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    out = path.with_name("changed.pt2")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, raw in entries.items():
            archive.writestr(name, raw)
    return out


def in_model(edit: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    def change(entries: dict[str, bytes]) -> None:
        name = next(name for name in entries if name.endswith("models/model.json"))
        document = json.loads(entries[name])
        edit(document)
        entries[name] = json.dumps(document).encode()

    return change


def pickles(entries: dict[str, bytes]) -> None:
    file = io.BytesIO()
    torch.save(Acts(), file)
    for name in list(entries):
        if "/sample_inputs/" in name:
            entries[name] = file.getvalue()
        if name.endswith("weights_config.json"):
            config = json.loads(entries[name])
            for payload in config["config"].values():
                payload["use_pickle"] = True
                entries[f"{name.partition('/')[0]}/data/weights/{payload['path_name']}"] = (
                    file.getvalue()
                )
            entries[name] = json.dumps(config).encode()


def node(document: dict[str, Any]) -> dict[str, Any]:
    return document["graph_module"]["graph"]["nodes"][0]


def target(text: str) -> Callable[[dict[str, bytes]], None]:
    return in_model(lambda document: node(document).update(target=text))


def expression(text: str) -> Callable[[dict[str, bytes]], None]:
    def edit(document: dict[str, Any]) -> None:
        sizes = document["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
        sizes[0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}

    return in_model(edit)


ACTING = {
    "os.system": (target("torch.os.system"), "is no op"),
    "builtins": (target("builtins.eval"), "is no op"),
    "a dunder": (target("torch.ops.aten.add.__class__"), "is no op"),
    "load_library": (target("torch.ops.load_library.x"), "is no op"),
    "a file": (target("torch.ops.aten.from_file.default"), "reads a file"),
    "an op that is not there": (
        target("torch.ops.mylib.rope.default"),
        "not there: mylib.rope.default x1",
    ),
    "an import": (expression("__import__('os').mkdir('ACTED')"), "more than arithmetic"),
    "an attribute": (expression("Integer.__subclasses__()"), "more than arithmetic"),
    "a call by text": (expression("sympify('1')"), "more than arithmetic"),
    "a giant": (expression("Pow(Integer(10), Integer(1000000000))"), "more than arithmetic"),
    "no archive": (lambda entries: entries.clear(), "models/"),
    "another document": (
        lambda entries: entries.update({n: b"[1]" for n in entries if n.endswith("model.json")}),
        "not of the form|not a readable",
    ),
    "a bomb": (
        lambda entries: entries.update(
            {n: b" " * ((1 << 28) + 2) for n in entries if n.endswith("models/model.json")}
        ),
        "more than 256 MiB",
    ),
    "brackets": (
        lambda entries: entries.update(
            {n: b"[" * 100_000 for n in entries if n.endswith("models/model.json")}
        ),
        "64 deep",
    ),
}


@pytest.mark.parametrize("name", ACTING)
def test_a_file_that_would_act_is_refused(
    name: str, cnn: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, words = ACTING[name]
    with pytest.raises(rt.types.TargetError, match=words) as refused:
        rt.trace(changed(cnn[2], change), phase="forward")
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_pickles_and_guards_of_a_file_are_not_opened(
    cnn: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def change(entries: dict[str, bytes]) -> None:
        pickles(entries)
        in_model(lambda document: document.update(guards_code=["__import__('os').mkdir('ACTED')"]))(
            entries
        )

    path = changed(cnn[2], change)
    with pytest.raises((pickle.UnpicklingError, OSError, RuntimeError, AssertionError)):
        # The oracle: torch itself opens them, so the pickle acts.
        torch.export.load(path)
        raise OSError("it acted")
    assert (tmp_path / "ACTED").is_dir()
    (tmp_path / "ACTED").rmdir()
    assert rt.trace(path, phase="forward").ops
    assert not (tmp_path / "ACTED").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Mul(Integer(32), Symbol('s28', positive=True, integer=True))", 64),
        ("Max(1, FloorDiv(s28 + 3, 2))", 2),
        ("-s28 + 5*s28**2", 18),
    ],
)
def test_sizes_are_arithmetic(text: str, value: int) -> None:
    assert evaluated(text, {"s28": 2}) == value


@pytest.mark.parametrize(
    "text",
    ["open('x')", "s.a", "s[0]", "lambda: 1", "[1]", "Symbol('a b')", "10**1000", "(", "f'{1}'"],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        checked(text)
