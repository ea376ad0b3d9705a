"""Training steps with sparse gradients, on real tensors; each a function with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH, IDS = 20_000, 32, 512

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def ids(count: int = IDS) -> Tensor:
    """Rows of a table: seldom the same twice."""
    return torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(count))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, index: Tensor) -> None:
    model(index).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_zeroed_first(model: nn.Module, optimizer: torch.optim.Optimizer, index: Tensor) -> None:
    optimizer.zero_grad()
    model(index).square().mean().backward()
    optimizer.step()


def train_emptied(model: nn.Module, optimizer: torch.optim.Optimizer, index: Tensor) -> None:
    model(index).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


class SameRows(nn.Module):
    """Two tables of one space of rows, read by the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.biases = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        return self.users(index) * self.biases(index)


class ReadTwice(nn.Module):
    """One table that is read twice: autograd adds two sparse gradients up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index) * self.table(index.flip(0))


class ByFunction(nn.Module):
    """`F.embedding` of a weight of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight, sparse=True)


class Bags(nn.Module):
    """Bags of eight rows, weighted or not."""

    def __init__(self, mode: str, sparse: bool = True, weighted: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, sparse=sparse)
        self.weighted = weighted

    def forward(self, index: Tensor) -> Tensor:
        weights = torch.linspace(0.1, 1, IDS) if self.weighted else None
        return self.bag(index, torch.arange(0, IDS, 8), weights)


class Recommender(nn.Module):
    """As DLRM: tables of several sizes, a bottom and a top network, products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True) for rows in (ROWS, ROWS // 2, 300)
        )
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(WIDTH + 6, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, index: Tensor) -> Tensor:
        x = self.bottom(dense)
        offsets = torch.arange(0, IDS, 4)
        rows = [x, *(table(index % table.num_embeddings, offsets) for table in self.tables)]
        stacked = torch.stack(rows, 1)
        first, second = torch.tril_indices(4, 4, -1)
        pairs = (stacked @ stacked.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([x, pairs], 1))


def recommender() -> Program:
    model = Recommender()
    of_tables = torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.1)
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    of_rest = torch.optim.Adam(dense, lr=0.1)

    def step(model: nn.Module, first: Any, second: Any, x: Tensor, index: Tensor) -> None:
        model(x, index).square().mean().backward()
        for optimizer in (first, second):
            optimizer.step()
        for optimizer in (first, second):
            optimizer.zero_grad()

    return step, (model, of_tables, of_rest, torch.randn(IDS // 4, 13), ids())


def accumulated() -> Program:
    model = nn.Embedding(ROWS, WIDTH, sparse=True)

    def step(model: nn.Module, optimizer: Any, first: Tensor, second: Tensor) -> None:
        for index in (first, second):
            model(index).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), ids(), ids(IDS // 2))


def _with(
    model: nn.Module, optimizer: str, step: Callable[..., Any] = train, **settings: Any
) -> Program:
    kind: Any = getattr(torch.optim, optimizer)
    return step, (model, kind(model.parameters(), lr=0.1, **settings), ids())


def _table(**settings: Any) -> nn.Module:
    return nn.Embedding(ROWS, WIDTH, sparse=True, **settings)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "sgd": lambda: _with(_table(), "SGD"),
    "sparse_adam": lambda: _with(_table(), "SparseAdam"),
    "adagrad": lambda: _with(_table(), "Adagrad"),
    "momentum": lambda: _with(_table(), "SGD", momentum=0.9),
    "zeroed_first": lambda: _with(_table(), "SGD", train_zeroed_first),
    "emptied": lambda: _with(_table(), "SGD", train_emptied),
    "padding": lambda: _with(_table(padding_idx=0), "SGD"),
    "max_norm": lambda: _with(_table(max_norm=1.0), "SGD"),
    "same_rows": lambda: _with(SameRows(), "SparseAdam"),
    "read_twice": lambda: _with(ReadTwice(), "SGD"),
    "by_function": lambda: _with(ByFunction(), "SGD"),
    "bag_sum": lambda: _with(Bags("sum"), "SGD"),
    "bag_mean": lambda: _with(Bags("mean"), "SGD"),
    "bag_weighted": lambda: _with(Bags("sum", weighted=True), "SGD"),
    "bag_adagrad": lambda: _with(Bags("mean"), "Adagrad"),
    "accumulated": accumulated,
    "recommender": recommender,
}
DENSE_BAGS: dict[str, Callable[[], Program]] = {
    mode: lambda mode=mode: _with(Bags(mode, sparse=False), "SGD")  # type: ignore[misc]
    for mode in ("sum", "mean", "max")
}
