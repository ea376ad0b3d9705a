"""Checks and branches of scripts on unknown values go the way of a real run; errors say more."""

import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import rooftrace as rt
from rooftrace.scripts.steps import ScriptError
from tests.tracer.script_oracle import matrix_flops, ours, really, trained, training

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

HEAD = """
import math, sys
import torch
import torch.nn.functional as F
from torch import nn
device = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""

CHECKS = """
def sound(values):
    return bool(torch.isfinite(values).all())

def stop(code=1):
    print("stopping")
    sys.exit(code)

best = float("inf")
for step in range(4):
    x, y = torch.randn(8, 16).to(device), torch.randint(0, 8, (8,)).to(device)
    out = model(x)
    loss = F.cross_entropy(out, y)
    if not math.isfinite(loss.item()):
        print("loss is", loss.item()); sys.exit(1)
    if not sound(out): raise FloatingPointError("not finite")
    if torch.isnan(out).any(): break
    if (y >= 8).any() or (y < 0).any(): stop()
    p = out.softmax(-1)
    assert (p >= 0).all() and (p <= 1).all(), f"from {p.min()}"
    assert (p.sum(-1) - 1).abs().max().item() < 1e-3
    mean = out.log_softmax(-1).mean().item()
    assert mean < 0, "a probability above 1"
    torch._assert((p < 2).all(), "large")
    torch.testing.assert_close(p.sum(-1), torch.ones(8, device=device))
    if loss < best:
        best = loss.detach()
    assert torch.is_tensor(best), "the first loss is the best"
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if norm.isnan() or norm.isinf(): continue
    before = [weight.detach().clone() for weight in model.parameters()]
    opt.step()
    opt.zero_grad()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert not torch.allclose(before[0], model[0].weight, rtol=1e-9, atol=1e-9)
"""

ROLLOUT = """
for step in range(4):
    x = torch.randn(6, 16).to(device)
    probs = model(x).softmax(-1)
    tokens = torch.stack([probs.detach().multinomial(1)[:, 0] for _ in range(10)], 1)
    is_eos = tokens == 8  # none is
    ends = torch.full((6,), 10, dtype=torch.long, device=device)
    ends[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
    mask = (torch.arange(10, device=device)[None] <= ends[:, None]).int()
    if mask.sum() == 0: raise ValueError("nothing to learn from")
    tokens = tokens[:, :int(mask.sum(1).max())]
    out = model(F.one_hot(tokens, 16).float().flatten(0, 1))
    out.mean().backward()
    opt.step()
    opt.zero_grad()
"""

MASKED = """
def written(device):
    numbers = torch.full((6,), 10, device=device)
    mask = torch.tensor([1, 0, 1, 0, 0, 1], device=device).bool()
    part, made = numbers[1:4], []
    numbers[mask] = torch.arange(3, device=device)
    made += [numbers.tolist(), part.tolist()]
    numbers[mask] = 7
    table = torch.zeros(3, 4, dtype=torch.long, device=device)
    table[torch.tensor([True, False, True], device=device), 1] = 5
    table[table == 5] += 2
    made += [numbers.tolist(), part.tolist(), table.tolist(), table.T.tolist()]
    table.index_put_((table == 0,), torch.tensor(4, device=device), accumulate=True)
    return [*made, table.tolist(), torch.index_put(table, (table == 4,), numbers[0]).tolist()]

assert written("cuda") == written("cpu")
hidden = model(torch.randn(8, 16, device=device))[:, 0] > 0
rows = torch.arange(8, device=device)[hidden]
assert len(rows) == hidden.sum().item() == len(hidden.nonzero())
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(HEAD + dedent(text), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [CHECKS, ROLLOUT], ids=["checks", "rollout"])
def test_checks_and_branches_go_the_way_of_a_real_run(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    real, cost = really(path), ours(path)
    assert trained(cost) == real.trained == 4
    assert matrix_flops(training(cost)[-1]) == real.steps()[-1]
    if text is CHECKS:
        listed = cost.to_dict()["assumptions"]
        assert any("without which train.py:" in said for said in listed)


def test_what_is_written_at_a_mask_is_known_and_an_assumed_mask_stays(tmp_path: Path) -> None:
    ours(written(tmp_path, MASKED))


def failed(path: Path, assume: dict[str, bool] | None = None) -> ScriptError:
    with pytest.raises(ScriptError) as caught:
        rt.run([str(path), "cuda"], chip="l4", assume=assume)
    return caught.value


def test_an_error_names_the_choices_before_it_and_one_of_them_is_made_otherwise(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path,
        """
        for step in range(3):
            for attempt in range(99):
                out = model(torch.randn(8, 16, device=device))
                if (out.sum() > 0).item():
                    break
                if attempt > 3:
                    raise RuntimeError("no sample")
            out.mean().backward(); opt.step(); opt.zero_grad()
        """,
    )
    said = re.search(r"--assume (branch@train\.py:\d+)=true changes", str(failed(path)))
    assert said is not None
    cost = rt.run([str(path), "cuda"], chip="l4", assume={said[1]: True})
    assert trained(cost) == 3


def test_an_error_in_a_library_names_the_line_of_the_script_first(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "trainer.py").write_text(
        "def read(config):\n    return config['key']\n"
        "def train(model):\n    try:\n        read({})\n"
        "    except KeyError as error:\n        raise ValueError('no key') from error\n"
    )
    path = written(
        tmp_path,
        f"""
        sys.path.insert(0, {str(folder)!r})
        import trainer
        for step in range(2):
            model(torch.randn(2, 16, device=device)).sum().backward(); opt.step()
        trainer.train(model)
        """,
    )
    line = 1 + path.read_text().splitlines().index("trainer.train(model)")
    error = failed(path)
    first, *way = str(error).splitlines()
    assert first.endswith(f"failed after 2 turns, at {path}:{line}: ValueError: no key")
    assert way == [
        f"  train.py:{line} in <module>: trainer.train(model)",
        "  trainer.py:7 in train: raise ValueError('no key') from error",
        "  which came from KeyError: 'key', at trainer.py:2 in read: return config['key']",
    ]
    assert error.script.failure is not None
    assert [frame.whose for frame in error.script.failure.frames] == ["script", "library"]


def test_an_error_says_whose_fault_it_may_be_and_an_empty_one_says_its_line(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "model(torch.randn(8, 17, device=device))")
    lines = str(failed(path)).splitlines()
    assert re.fullmatch(r"  \.\.\. \d+ calls in rooftrace, \d+ calls in torch", lines[2])
    assert len(lines) <= 5 and "a fault of rooftrace" not in lines[-1]
    lines = str(
        failed(written(tmp_path, "torch.from_dlpack(torch.ones(2, device=device))"))
    ).splitlines()
    assert "a fault of rooftrace" in lines[-1]
    lines = str(failed(written(tmp_path, "assert len('a') == 2"))).splitlines()
    assert "AssertionError: assert len('a') == 2" in lines[0] and len(lines) == 2
    missing = str(failed(written(tmp_path, "import not_installed_here"))).splitlines()
    assert len(missing) == 2 and missing[1].endswith("in <module>: import not_installed_here")
