"""Scripts that train in another thread than their main one cost what they cost in the main one."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.estimates import ScriptCost
from tests.tracer.script_oracle import all_flops

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

TRAIN = """
import queue, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    return model, torch.optim.AdamW(model.parameters())

def train(model, optimizer, steps=5):
    scaler = torch.amp.GradScaler()
    for step in range(steps):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 32, device="cuda")).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def evaluate(model):
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 32, device="cuda"))
"""
WAYS = {
    "main": "model, optimizer = build(); train(model, optimizer); evaluate(model)",
    "thread": (
        "model, optimizer = build()\n"
        "thread = threading.Thread(target=train, args=(model, optimizer))\n"
        "thread.start(); thread.join(); evaluate(model)"
    ),
    "task": (
        "def all():\n"
        "    model, optimizer = build(); train(model, optimizer); evaluate(model)\n"
        "ThreadPoolExecutor(1).submit(all).result()"
    ),
    "left": (
        "def all():\n"
        "    model, optimizer = build(); train(model, optimizer); evaluate(model)\n"
        "threading.Thread(target=all).start()"
    ),
    "again": (
        "model, optimizer = build()\n"
        "ThreadPoolExecutor(1).submit(train, model, optimizer, 3).result()\n"
        "train(model, optimizer, 2); evaluate(model)"
    ),
    "watched": (  # the main thread waits in its own way
        "model, optimizer = build()\n"
        "thread = threading.Thread(target=train, args=(model, optimizer), daemon=True)\n"
        "thread.start()\n"
        "while thread.is_alive(): time.sleep(0.001)\n"
        "evaluate(model)"
    ),
    "busy": (  # it computes something on the host meanwhile
        "model, optimizer = build()\n"
        "thread = threading.Thread(target=train, args=(model, optimizer))\n"
        "thread.start()\n"
        "while thread.is_alive(): sum(range(1000))\n"
        "evaluate(model)"
    ),
    "tried": (  # another thread than that which trains evaluates
        "model, optimizer = build(); train(model, optimizer)\n"
        "thread = threading.Thread(target=evaluate, args=(model,))\n"
        "thread.start(); thread.join()"
    ),
    "feeding": (  # what prepares batches on the device trains nothing, and is part of no turn
        "batches, look = queue.Queue(), nn.Linear(32, 32).cuda()\n"
        "def feed():\n"
        "    for _ in range(5): batches.put(look(torch.randn(8, 32, device='cuda')))\n"
        "model, optimizer = build()\n"
        "thread = threading.Thread(target=feed)\n"
        "thread.start(); batches.get(); thread.join(); train(model, optimizer); evaluate(model)"
    ),
}


@cache
def cost_of(way: str, steps: int | None = None, text: str = "") -> ScriptCost:
    with TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN + (text or WAYS[way]) + "\n", encoding="utf-8")
        return rt.run([str(script)], chip="a100-sxm-40", steps=steps)


def turns(cost: ScriptCost) -> list[tuple[object, ...]]:
    """What the turns are and cost: those of a kind together."""
    names = ("kind", "shape", "t_est", "flops", "bytes_hbm", "peak")
    return [(row.turns, *(row.to_dict()[name] for name in names)) for row in cost.rows]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "main"])
def test_a_thread_trains_as_the_main_one_does(way: str) -> None:
    wanted = turns(cost_of("main"))
    assert [row[0] for row in wanted] == [1, 4, 3]
    made = turns(cost_of(way))
    if way == "again":  # what prepares a step after the last one of the thread is part of none
        assert sum(row[0] for row in made) == 8 and made[-1] == wanted[-1]
        assert all_flops(cost_of(way)) == all_flops(cost_of("main"))
    elif way == "feeding":  # its weights and batches are alive
        assert [row[:-1] for row in made] == [row[:-1] for row in wanted]
    else:
        assert made == wanted


SERVE = """
import asyncio, queue, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).cuda().eval()
asked, answers = queue.Queue(), queue.Queue()

def answer(tokens):
    with torch.no_grad():
        return model(tokens.cuda()).argmax(-1).tolist()

def loop():
    while True:
        tokens = asked.get()
        if tokens is None:
            break
        answers.put(answer(tokens))

def requests():
    return [torch.randn(8, 32) for _ in range(6)]
"""
SERVERS = {
    "main": "for tokens in requests(): answer(tokens)",
    "loop": (
        "thread = threading.Thread(target=loop); thread.start()\n"
        "for tokens in requests(): asked.put(tokens)\n"
        "for _ in range(6): answers.get()\n"
        "asked.put(None); thread.join()"
    ),
    "warm": (  # the main thread has called the model before
        "answer(torch.randn(8, 32))\n"
        "threading.Thread(target=loop, daemon=True).start()\n"
        "for tokens in requests()[:5]:\n"
        "    asked.put(tokens); answers.get()"
    ),
    "polled": (
        "threading.Thread(target=loop, daemon=True).start()\n"
        "for tokens in requests():\n"
        "    asked.put(tokens)\n"
        "    while answers.empty(): time.sleep(0.001)\n"
        "    answers.get()"
    ),
    "pool": "with ThreadPoolExecutor(3) as pool: list(pool.map(answer, requests()))",
    "threads": (
        "threads = [threading.Thread(target=answer, args=(tokens,)) for tokens in requests()]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()"
    ),
    "in turn": (  # the main thread answers too
        "with ThreadPoolExecutor(1) as pool:\n"
        "    for tokens in requests()[:3]:\n"
        "        pool.submit(answer, tokens).result(); answer(tokens)"
    ),
    "asyncio": (
        "async def serve():\n"
        "    await asyncio.gather(*(asyncio.to_thread(answer, x) for x in requests()))\n"
        "asyncio.run(serve())"
    ),
}


@cache
def served(way: str) -> ScriptCost:
    with TemporaryDirectory() as folder:
        script = Path(folder, "serve.py")
        script.write_text(SERVE + SERVERS[way] + "\n", encoding="utf-8")
        return rt.run([str(script)], chip="a100-sxm-40", steps=None)


@pytest.mark.parametrize("way", [way for way in SERVERS if way != "main"])
def test_each_request_that_a_thread_answers_is_a_turn(way: str) -> None:
    cost = served(way)
    assert {row.kind for row in cost.rows} == {"inference"}
    assert sum(row.turns for row in cost.rows) == 6
    assert all_flops(cost) == all_flops(served("main"))


WORKERS = {
    "one after another": "for _ in range(3): train(*build(), 6)",
    "at once": (
        "threads = [threading.Thread(target=lambda: train(*build(), 6)) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()"
    ),
}


@pytest.mark.parametrize("way", list(WORKERS))
def test_each_of_several_trainers_has_its_steps(way: str) -> None:
    cost = cost_of("main", text=WORKERS[way])
    assert {row.kind for row in cost.rows} == {"training"}
    assert sum(row.turns for row in cost.rows) == 18
    assert not any(graph.unrecorded for graph in cost.script.graphs)
    each = cost_of("main", text="train(*build(), 6)")
    assert all_flops(cost) == 3 * all_flops(each)


@pytest.mark.parametrize("way", ["thread", "task", "left"])
def test_a_script_that_trains_in_a_thread_ends_after_its_steps(way: str) -> None:
    cost = cost_of(way, 2)
    assert (cost.script.ended, sum(row.turns for row in cost.rows)) == ("stopped", 2)


GRAPHED = """
def all():
    model, _ = build()
    x = torch.randn(8, 32, device="cuda")
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        for _ in range(3):
            graph.replay()
            out.add_(1)

"""


def test_a_cuda_graph_that_a_thread_replays_is_what_it_is_in_the_main_one() -> None:
    main, thread = (
        [
            [(op.target, op.module, op.part) for op in graph.ops]
            for graph in cost_of("main", text=GRAPHED + way).script.graphs
        ]
        for way in ("all()", "threading.Thread(target=all).start()")
    )
    assert main == thread
    assert any("addmm" in target and module for target, module, _ in thread[-1])


FORKS = """
import multiprocessing, sys
import torch
from torch import nn

def work(size):
    return torch.ones(size, device=sys.argv[1]).sum().item()

model = nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map(work, [3, 5]) == [3.0, 5.0] or sys.argv[1] == "cuda"
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_forked_process_computes_is_missing_only_on_the_device(
    device: str, tmp_path: Path
) -> None:
    """Also where the steps were recorded before."""
    script = tmp_path / "train.py"
    script.write_text(FORKS)
    cost = rt.run([str(script), device], chip="l4", steps=None)
    missing = [a for a in cost.script.graphs[-1].assumptions if a.kind == "unrecorded"]
    assert bool(missing) == (device == "cuda")
