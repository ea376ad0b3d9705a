"""The caching allocator beside a plain one, its documented sizes, and steps run through it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.memory import CachingAllocator, allocator as replaying, program
from rooftrace.costmodels.memory.allocator import Piece
from rooftrace.costmodels.memory.footprint import memory
from rooftrace.hardware.chipfile import load_chip
from tests.costmodels.memory_models import built, loss_of

KIB, MIB = 2**10, 2**20


# -- by the documentation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # blocks are multiples of 512 bytes; small ones share 2 MiB
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),  # from there to 10 MiB they share 20 MiB
        (10 * MIB, 10 * MIB, 10 * MIB),  # larger ones have a segment of their own
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # whose rest of less than 1 MiB is not split off
        (10 * MIB + 512 * KIB, 10 * MIB + 512 * KIB, 12 * MIB),
    ],
)
def test_one_block(size: int, allocated: int, reserved: int):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_freed_block_is_given_out_again_and_nothing_is_given_back():
    allocator = CachingAllocator()
    first = allocator.allocate(64 * MIB)
    address = first.address
    allocator.release(first)
    assert (allocator.allocated, allocator.reserved) == (0, 64 * MIB)
    assert allocator.allocate(48 * MIB).address == address
    assert allocator.allocate(16 * MIB).address == address + 48 * MIB  # the rest of it
    assert allocator.reserved == 64 * MIB


def test_streams_and_pools_do_not_share():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(64 * MIB))
    allocator.allocate(64 * MIB, "all_gather")
    assert allocator.reserved == 128 * MIB
    allocator.allocate(512)  # a small one does not take from a large segment
    assert allocator.reserved == 130 * MIB


def test_sizes_that_grow_fragment_segments_and_not_one_that_expands():
    """The case for expandable segments in PyTorch's notes: each request a little larger."""
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        for size in range(20, 60, 2):
            allocator.release(allocator.allocate(size * MIB))
        reserved[expandable] = allocator.reserved
    assert reserved[False] == sum(range(20, 60, 2)) * MIB  # no segment is large enough
    assert reserved[True] == 60 * MIB  # pages of 20 MiB, for the largest of 58


# -- an oracle -------------------------------------------------------------------------------------


class Plain:
    """The same rules over lists that are searched from end to end: segments of [size, used]."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.segments: dict[bool, list[list[list]]] = {True: [], False: []}

    @property
    def reserved(self) -> int:
        return sum(c[0] for s in self.segments.values() for cells in s for c in cells)

    @property
    def allocated(self) -> int:
        return sum(c[0] for s in self.segments.values() for cells in s for c in cells if c[1])

    def allocate(self, size: int) -> list:
        size = (size + 511) // 512 * 512
        small = size <= MIB
        segments = self.segments[small]
        fitting = [
            (cell[0], number, place)
            for number, cells in enumerate(segments)
            for place, cell in enumerate(cells)
            if not cell[1] and cell[0] >= size
        ]
        if self.expandable and segments:  # the growing end is the last choice
            end = (segments[0][-1][0], 0, len(segments[0]) - 1)
            fitting = [f for f in fitting if f != end] or fitting
        if fitting:
            _, number, place = min(fitting)
        elif self.expandable:
            page = 2 * MIB if small else 20 * MIB
            if not segments:
                segments.append([])
            cells = segments[0]
            if not cells or cells[-1][1]:
                cells.append([0, False])
            while cells[-1][0] < size:
                cells[-1][0] += page
            number, place = 0, len(cells) - 1
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else 0
            segments.append([[whole or (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB, False]])
            number, place = len(segments) - 1, 0
        cells = segments[number]
        cell = cells[place]
        rest = cell[0] - size
        if (rest >= 512) if small or self.expandable else (rest > MIB):
            cells.insert(place + 1, [rest, False])
            cell[0] = size
        cell[1] = True
        return cell

    def release(self, cell: list) -> None:
        cell[1] = False
        for segments in self.segments.values():
            for cells in segments:
                joined: list[list] = []
                for each in cells:
                    if joined and not joined[-1][1] and not each[1]:
                        joined[-1] = [joined[-1][0] + each[0], False]
                    else:
                        joined.append(each)
                cells[:] = joined


SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(8 * MIB, 12 * MIB),
    st.integers(1, 80 * MIB),
)


@pytest.mark.parametrize("expandable", [False, True])
@given(steps=st.lists(st.one_of(SIZES, st.integers(-30, -1)), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_as_a_plain_allocator(expandable: bool, steps: list[int]):
    """After every request: the same bytes, blocks that do not overlap, no two free neighbours."""
    ours, plain = CachingAllocator(expandable), Plain(expandable)
    alive: list[tuple[Piece, list]] = []
    peak = 0
    for step in steps:
        if step > 0:
            alive.append((ours.allocate(step), plain.allocate(step)))
        elif alive:
            block, cell = alive.pop(step % len(alive))
            ours.release(block)
            plain.release(cell)
        assert (ours.allocated, ours.reserved) == (plain.allocated, plain.reserved)
        peak = max(peak, ours.allocated)
        places = sorted((block.address, block.size) for block, _ in alive)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
    assert ours.most_allocated == peak <= ours.reserved
    for block, cell in alive:
        ours.release(block)
        plain.release(cell)
    assert ours.allocated == 0 and ours.reserved == plain.reserved


# -- steps -----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two products of sizes that are whole MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 4096, bias=False)
        self.down = nn.Linear(4096, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def estimate(model: nn.Module, *x: torch.Tensor, chip: str = "h100-sxm", **options: object):
    return rt.estimate(rt.trace(model, *x, **options), chip=chip, execution="eager")


def test_a_step_with_whole_mebibytes_takes_its_tensors_and_workspaces():
    x = torch.zeros(2048, 1024)
    for phase, threads in (("forward", 1), ("training", 2)):
        found = estimate(Mlp(), x, phase=phase)
        assert found.reserved.allocated - found.memory.peak == threads * 32 * MIB
        older = estimate(Mlp(), x, phase=phase, chip="a100-sxm-80").reserved
        assert older.allocated - found.memory.peak == threads * (2 * 4096 + 8 * 16) * KIB
        assert found.reserved.workspaces == {"BLAS": threads * 32 * MIB}
        assert found.reserved.allocated <= found.reserved.reserved


def test_the_context_of_a_process_takes_room():
    chip = load_chip("h100-sxm")
    found = estimate(Mlp(), torch.zeros(8, 1024))
    assert found.reserved.context == chip.context.value
    host = replace(chip, kind="cpu")
    assert rt.estimate(found.graph, chip=host, execution="eager").reserved is None
    assert host.room() == host.memory_capacity.value
    assert chip.room() == chip.memory_capacity.value - chip.context.value
    small = chip.with_facts({"memory_capacity": 1e8})
    assert small.room() == 1e8  # a context of 0.5 GiB cannot be in it
    assert chip.room(kept_free=0.1) == 0.9 * chip.memory_capacity.value  # the context is in it


@pytest.mark.parametrize("name", ["llama checkpointed", "mixtral", "recurrent", "unet", "gated"])
def test_tensors_alone_give_the_peak(name: str):
    """Without workspaces and rounding the allocator's peak is that of the liveness."""
    model, inputs = built(name, "training")
    graph = rt.trace(model, **inputs, phase="training", loss=loss_of)
    exact = Exact()
    program(graph).run(exact, blas=0, taken=())
    assert exact.most_allocated == memory(graph).peak


class Exact(CachingAllocator):
    """Counts what is asked for, in no blocks."""

    def allocate(self, size: int, stream: str = "") -> Piece:
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return Piece(None, 0, size)  # type: ignore[arg-type]

    def release(self, block: Piece) -> None:
        self.allocated -= block.size


def test_left_out_iterations_are_as_good_as_all(monkeypatch: pytest.MonkeyPatch):
    graph = rt.trace("gpt2", batch=2, seq=128, phase="training")
    every = program(graph.expand())
    monkeypatch.setattr(replaying, "VISITED", 0)
    few = program(graph)
    assert len(few.step) < len(every.step)
    counted = []
    for written in (every, few):
        allocator = CachingAllocator()
        written.run(allocator, blas=32 * MIB)
        counted.append((allocator.most_allocated, allocator.reserved))
    (allocated, reserved), (shorter, kept) = counted
    assert shorter == pytest.approx(allocated, rel=0.002)
    assert kept == pytest.approx(reserved, rel=0.03)


class Each(nn.Module):
    """A function of what a weight scales."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def test_what_eager_ops_make_for_themselves_is_there_once():
    """With all that the op was given: the caller has it until the last kernel is done."""

    def step(function):
        x = torch.zeros(256, 8192)  # 8 MiB
        return estimate(Each(function), x, phase="training", optimizer="none")

    # The input, the result, its gradient, gradient times result, and the gradient that is made.
    softmax = step(lambda x: x.softmax(-1))
    assert softmax.reserved.workspaces == {}
    assert softmax.memory.peak == 5 * 8 * MIB + 2 * 4  # the weight and its gradient
    # The input twice, one time scaled; the gradient of a sum, written out; that which is made.
    norm = step(lambda x: F.layer_norm(x, (8192,)).sum())
    assert norm.reserved.workspaces == {}
    assert norm.memory.peak == pytest.approx(4 * 8 * MIB, rel=0.001)
    # Rolled along one dimension and then along the other: the input, the scaled one, and each.
    rolled = estimate(Each(lambda x: x.roll((1, 2), (0, 1))), torch.zeros(256, 8192))
    assert rolled.memory.peak == pytest.approx(4 * 8 * MIB, rel=0.001)


def test_what_group_norms_and_sorting_take():
    x = torch.zeros(64, 32, 1024)  # 8 MiB
    norm = Each(lambda x: F.group_norm(x, 4))
    step = estimate(norm, x, phase="training").reserved
    assert step.workspaces == {"norms": 4 * 64 * (32 + 2 * 4)}  # and sums, 4 * 64 * 2 * 32, apart
    x = torch.zeros(256, 8192)
    rows = estimate(Each(lambda x: x.sort(-1)[0]), x).reserved
    assert rows.workspaces == {"sorting": (8 + 8 + 4) * 256 * 8192}  # indices, twice, and keys
    short = estimate(Each(lambda x: x.view(512, 4096).sort(-1)[0]), x).reserved
    assert short.workspaces == {}


def test_convolutions_may_copy_their_layout():
    net = nn.Conv2d(64, 64, 3, bias=False).half()
    x = torch.zeros(8, 64, 128, 128, dtype=torch.half)
    found = estimate(net, x).reserved
    copies = 2 * 8 * 64 * (128**2 + 126**2) + 2 * 64 * 64 * 9
    assert found.workspaces == {"convolutions": copies + 994 * KIB}
    assert found.allocated_least < found.allocated <= found.allocated_least + copies + 3 * MIB
    last = estimate(
        net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    )
    assert last.reserved.workspaces == {"convolutions": 994 * KIB}


@pytest.mark.parametrize(
    ("length", "published"), [(32, 0.96), (64, 1.4814), (256, 12.1929), (1024, 178.9741)]
)
def test_the_peak_of_a_tiny_convolution_lies_between_the_least_and_the_most(
    length: int, published: float
) -> None:
    """MiB of Liger-Kernel's benchmark on an RTX 3090 (multi_token_attention, 2025-04-28): the most
    that was allocated in a second call, with the gradients of the first."""

    def mixed(scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()[None, None]
        low = torch.full((), -1e9, device=scores.device, dtype=scores.dtype)
        zero = torch.zeros((), device=scores.device, dtype=scores.dtype)
        rows = F.softmax(scores.masked_fill(~seen, low), dim=-1)
        return F.conv2d(rows, weight, bias, padding=1).masked_fill(~seen, zero)

    def step(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
        def full() -> None:
            mixed(x, module.weight, module.bias).backward(gradient, retain_graph=True)

        full()
        full()

    bf16 = {"dtype": torch.bfloat16, "device": "meta"}
    x = torch.empty(2, 4, length, length, **bf16, requires_grad=True)
    graph = rt.trace(step, nn.Conv2d(4, 4, 3, **bf16), x, torch.empty_like(x))
    found = rt.estimate(graph, chip="rtx-3090", execution="eager").reserved
    assert found.allocated_least <= published * MIB <= found.allocated * 1.01
    assert found.allocated == pytest.approx(published * MIB, abs=0.4 * MIB)


def test_attention_sums_gradients_of_queries_in_fp32():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q * self.weight, q, q)

    q = torch.zeros(2, 8, 1000, 64, dtype=torch.bfloat16)
    found = estimate(Attention(), q, phase="training", optimizer="none")
    rounded = 1024  # rows, to multiples of 128
    assert found.reserved.workspaces == {"attention": 4 * 2 * 8 * rounded * (64 + 1)}
