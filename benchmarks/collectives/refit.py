"""Refits the constants of collectives in system files to published measurements, and scores them.

    python benchmarks/collectives/refit.py DATA [--toml]

Scores are of sizes that were held back: constants of every other size predict the rest, both ways.
What is printed as TOML is fitted to all rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import rows as published

from rooftrace.costmodels.timing import per_rank_link_bytes
from rooftrace.costmodels.timing.collectives import (
    SENDERS,
    RoutedTokens,
    exchange_bytes,
    level_bytes,
    steps_of,
)
from rooftrace.hardware.chipfile import toml_sections
from rooftrace.hardware.systems.reading import collective_rows, exchange_rows
from rooftrace.hardware.systems.records import ExchangeFit
from rooftrace.measured.fit.cases import errors
from rooftrace.measured.fit.collectives import (
    as_fit,
    fit_constants,
    least,
    rounded,
    seconds_of,
)

Table = pd.DataFrame


def halves(table: Table, column: str) -> Iterator[tuple[Table, Table]]:
    """(fitted, held back): every other size, both ways; sizes are told apart by powers of two."""
    powers = np.round(np.log2(table[column])).astype(int)
    places = powers.groupby(table.get("source", powers * 0)).rank(method="dense").astype(int)
    for parity in (0, 1):
        yield table[places % 2 == parity], table[places % 2 != parity]


# -- collectives -----------------------------------------------------------------------------------


def terms(table: Table) -> tuple[Any, ...]:
    """Steps, seconds on the wire by the datasheet, ranks, measured seconds."""
    op, link = table.op.iloc[0], published.LINKS[table.system.iloc[0]]
    ranks = table.ranks.to_numpy(float)
    steps = np.array([steps_of(op, int(n), outermost=False) for n in ranks])
    sent = [
        per_rank_link_bytes(op, b, int(n)) for b, n in zip(table.bytes, table.ranks, strict=True)
    ]
    return steps, np.array(sent) / link, ranks, table.seconds.to_numpy()


def two_ways(table: Table) -> bool:
    """Whether an all-reduce has a second way: those of serving libraries, where links are fast."""
    return table.library.iloc[0] != "nccl" and table.system.iloc[0] != "l40s"


def weights_of(table: Table) -> Any:
    """How much each row counts: rows of one source together as much as its share."""
    shares = table.source.map(SHARES)
    return (shares / table.groupby("source").source.transform("size")).to_numpy(float)


SHARES = {"aiconfigurator": 1.0, "vidur": 0.5}
"""vidur's times below 1 MB have 25 us of the host in them."""


def predicted(fitted: Table, held: Table) -> Any:
    """Seconds of held-back rows by constants of the others."""
    constants = fit_constants(*terms(fitted), direct=two_ways(fitted), weights=weights_of(fitted))
    return seconds_of(constants, *terms(held)[:3])


def held_back(
    table: Table, keys: list[str], column: str, predict: Callable[[Table, Table], Any]
) -> Table:
    """Each row with the prediction by the other half of its group."""
    parts = [
        held.assign(predicted=predict(fitted, held))
        for _, group in table.groupby(keys)
        for fitted, held in halves(group, column)
    ]
    return pd.concat(parts)


def collective_block(group: Table) -> tuple[str, dict[str, object]]:
    """The [[collective]] table of all rows of one op."""
    first = group.iloc[0]
    fit = as_fit(
        fit_constants(*terms(group), direct=two_ways(group), weights=weights_of(group)),
        library=first.library,
        op=first.op,
        level="nvlink" if first.system != "l40s" else "pcie",
        ranks=int(group.ranks.max()),
        nbytes=float(group.bytes.max()),
        kind="measured",
        source=" and ".join(sorted(set(group.source))),
    )
    return "[[collective]]", collective_rows(fit)


# -- two nodes -------------------------------------------------------------------------------------

CARDS = {"a100_sxm": 4, "h100_sxm": 8}
"""Network cards of a node, each for any chip of it; those of the A100s follow from the rates."""


def outer_terms(table: Table, inner: dict[str, tuple[float, ...]]) -> tuple[Any, ...]:
    """Fixed seconds within the node, steps and wire seconds between nodes, measured seconds."""
    op, system = table.op.iloc[0], table.system.iloc[0]
    alpha, step = inner[op][:2]
    steps = np.array([steps_of(op, int(n), outermost=False) for n in table.inside])
    shares = [
        level_bytes(op, 1.0, (n, n // i, 1), ring=True)[1]
        for n, i in zip(table.ranks, table.inside, strict=True)
    ]
    cards = np.minimum(table.inside, CARDS[system]) / table.inside
    wire = np.array(shares) * table.bytes / (published.NIC[system] * cards)
    waits = np.full(len(table), float(steps_of(op, 2, outermost=True)))
    return alpha + step * steps, waits, wire.to_numpy(), table.seconds.to_numpy()


def fit_outer(terms_of: tuple[Any, ...]) -> tuple[float, ...]:
    """(step, efficiency, p) between nodes."""
    inside, waits, wire, seconds = terms_of

    def loss(q: Any) -> float:
        return float(np.abs(np.log(outer_seconds(np.exp(q), inside, waits, wire) / seconds)).mean())

    starts = (np.log([1e-5, 0.7, 1.0]), np.log([3e-5, 0.9, 2.0]))
    return tuple(np.exp(least(loss, starts, (-17, -3, -0.9), (-7, 0, 1.5))))


def outer_seconds(constants: Any, inside: Any, waits: Any, wire: Any) -> Any:
    """Seconds of a group over two nodes."""
    step, efficiency, p = constants
    fixed, sent = inside + step * waits, wire / efficiency
    high, low = np.maximum(fixed, sent), np.minimum(fixed, sent)
    return high * (1 + (low / high) ** p) ** (1 / p)


def told_outer(within: Table, outer: Table) -> None:
    """Constants between two nodes, and their scores on sizes that were held back."""
    for (system, op), group in outer.groupby(["system", "op"]):
        rows = within[(within.system == system) & (within.op == op)]
        inner = {op: fit_constants(*terms(rows), weights=weights_of(rows))}
        done = held_back(
            group,
            ["system"],
            "bytes",
            lambda fitted, held, inner=inner: outer_seconds(
                fit_outer(outer_terms(fitted, inner)), *outer_terms(held, inner)[:3]
            ),
        )
        told(f"two nodes, {system} {op}", done, ["ranks", "inside"])
        step, efficiency, p = fit_outer(outer_terms(group, inner))
        print(f"    step {step * 1e6:.4g} us, efficiency {efficiency:.4g}, p {p:.3g}")


# -- experts ---------------------------------------------------------------------------------------

NAMES = ("alpha", "step", "efficiency", "p", "outer", "each", "size", "turn")
LOW = (-14.0, -16.0, -4.0, -0.9, -4.0, -20.0, -26.0, -21.0)
HIGH = (-9.0, -9.0, 0.0, 1.2, 0.0, -15.0, -19.0, -11.0)
STARTS = (
    tuple(np.log([1e-5, 5e-6, 0.6, 1.5, 0.8, 1e-8, 3e-10, 2.5e-6])),
    tuple(np.log([3e-5, 4e-6, 0.6, 0.9, 0.8, 5e-9, 3e-10, 1e-8])),
    tuple(np.log([2e-5, 1e-5, 0.4, 1.0, 0.5, 2e-8, 1e-9, 1e-7])),
)


def exchange_seconds(constants: dict[str, float], table: Table) -> Any:
    """Seconds of dispatches or combines by constants: what `network` computes, for a table."""
    mode, ranks = table["mode"].iloc[0], table.node_num * table.inside
    sent = [
        exchange_bytes(RoutedTokens(t, h, k, e), int(n), int(m), mode)
        for t, h, k, e, n, m in zip(
            table.num_token,
            table.hidden_bytes,
            table.num_topk,
            table.num_experts,
            ranks,
            table.node_num,
            strict=True,
        )
    ]
    near, far = np.array(sent).T
    system = table.system.iloc[0]
    return _exchange(constants, table, near / published.LINKS[system], far / published.NIC[system])


def _exchange(q: dict[str, float], table: Table, near: Any, far: Any) -> Any:
    wire = np.maximum(near / q["efficiency"], far / q["outer"])
    tokens = table.num_token.to_numpy(float)
    if table["mode"].iloc[0] == "normal":
        wire = wire + q["turn"] * tokens
    else:
        wire = np.maximum(wire, q["turn"] * tokens / np.minimum(table.num_experts, SENDERS))
    fixed = q["alpha"] + q["step"] * np.log2(table.node_num.to_numpy(float))
    fixed = fixed + q["each"] * table.num_experts + q["size"] * table.hidden_bytes
    high, low = np.maximum(fixed, wire), np.minimum(fixed, wire)
    return high * (1 + (low / high) ** q["p"]) ** (1 / q["p"])


def fit_exchange(table: Table) -> dict[str, float]:
    """Constants of one way of sending tokens that fit a table best."""
    measured = table.seconds.to_numpy()
    ranks = table.node_num * table.inside
    columns = (table.num_token, table.hidden_bytes, table.num_topk, table.num_experts)
    sent = np.array(
        [
            exchange_bytes(RoutedTokens(*routed), int(n), int(m), table["mode"].iloc[0])
            for *routed, n, m in zip(*columns, ranks, table.node_num, strict=True)
        ]
    )
    system = table.system.iloc[0]
    near, far = sent[:, 0] / published.LINKS[system], sent[:, 1] / published.NIC[system]

    def loss(q: Any) -> float:
        constants = dict(zip(NAMES, np.exp(q), strict=True))
        guess = _exchange(constants, table, near, far)
        return float(np.abs(np.log(guess / measured)).mean())

    best = np.exp(least(loss, STARTS, LOW, HIGH))
    return {name: float(value) for name, value in zip(NAMES, best, strict=True)}


def exchange_block(table: Table) -> tuple[str, dict[str, object]]:
    """The [[exchange]] table of all rows of one way."""
    constants = {name: rounded(value) for name, value in fit_exchange(table).items()}
    if table.node_num.max() == 1:
        constants |= {"outer": 0.0, "step": 0.0}
    fit = ExchangeFit(
        mode=table["mode"].iloc[0],
        way=table.way.iloc[0],
        ranks=int((table.node_num * table.inside).max()),
        tokens=int(table.num_token.max()),
        kind="measured",
        source="deepep",
        **constants,
    )
    return "[[exchange]]", exchange_rows(fit)


# -- what is printed -------------------------------------------------------------------------------


def told(title: str, table: Table, keys: list[str]) -> None:
    """A line for all rows, and one for each group."""
    print(f"{title}: {score_of(table)}")
    for key, group in table.groupby(keys):
        name = " ".join(map(str, key if isinstance(key, tuple) else (key,)))
        print(f"    {name}: {score_of(group)}")


def score_of(table: Table) -> str:
    """The errors of predicted seconds, in words."""
    off = errors([""] * len(table), table.predicted, table.seconds)
    return f"mean {off.mean:.1%}, p90 {off.p90:.1%} of {off.count}"


def main() -> None:
    """Print scores, and with --toml what system files hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder of collectives.csv.gz and its like")
    parser.add_argument("--toml", action="store_true", help="print the tables of system files")
    arguments = parser.parse_args()
    nccl = published.collectives(arguments.data)
    # The sends of vidur between two nodes have one rank on each.
    outer, within = nccl[nccl.inside < nccl.ranks], nccl[nccl.inside == nccl.ranks]
    custom = published.custom(arguments.data)
    experts = published.exchanges(arguments.data)
    if arguments.toml:
        for system in published.LINKS:
            print(f"# {system}")
            blocks = [
                block(group)
                for table, keys, block in (
                    (within, ["library", "op"], collective_block),
                    (custom, ["library", "op"], collective_block),
                    (experts, ["mode", "way"], exchange_block),
                )
                for _, group in table[table.system == system].groupby(keys)
            ]
            print(toml_sections(blocks))
        return
    nccl_only = within[within.op != "send"]
    keys = ["system", "library", "op"]
    for title, table in (
        ("NCCL over NVLink", nccl_only[nccl_only.system != "l40s"]),
        ("NCCL over PCIe", nccl_only[nccl_only.system == "l40s"]),
        ("serving libraries over NVLink", custom[custom.system != "l40s"]),
        ("serving libraries over PCIe", custom[custom.system == "l40s"]),
    ):
        done = held_back(table, keys, "bytes", predicted)
        told(title, done, ["source", "op"] if title.startswith("NCCL") else ["library"])
        sys.stdout.flush()
    told_outer(within, outer)
    done = held_back(
        experts,
        ["system", "mode", "way"],
        "num_token",
        lambda fitted, held: exchange_seconds(fit_exchange(fitted), held),
    )
    told("DeepEP", done, ["mode", "way"])
    told("DeepEP by nodes", done, ["mode", "way", "node_num"])


if __name__ == "__main__":
    main()
