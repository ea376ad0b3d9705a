"""Our fusion groups beside Inductor's: `python benchmarks/inductor/compare.py [MODEL ...]`.

Views, and ops that a library kernel runs in Inductor, are left out on both sides.  An op that
Inductor computes again in several kernels stands in the one that writes its result, or else in the
first.  F1: of pairs of ops in one kernel.  ARI: adjusted Rand index.  MB: through HBM by the fused
kernels, ours and Inductor's, gathers counted by rows; raw: the one over the other.  adjusted: the
same without what Inductor moves around library kernels (copies to other layouts, biases of
convolutions), and again: what the first half of a split reduction reads before the second half
does, which finds it in an L2 of 50 MB where the largest is well below that.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import inductor
import models
from agreement import compiled_graph, our_groups

from rooftrace.graph.graph import OpGraph
from rooftrace.measured.alignment.compiled import is_launched
from rooftrace.measured.alignment.compiled_steps import Agreement

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "inductor"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(models.MODELS)}; default: all")
    parser.add_argument("--groups", action="store_true", help="print both kernels of every op")
    parser.add_argument("--phase", default="forward", choices=("forward", "training"))
    parser.add_argument("--golden", action="store_true", help=f"write {GOLDEN.name}/MODEL.json")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    inductor.pretend_cuda()
    print(
        f"{'model':13} {'ops':>4} {'kernels':>8} {'precision':>9} {'recall':>6} {'F1':>5} "
        f"{'ARI':>5} {'MB':>15} {'raw':>5} {'around':>7} {'again':>6} {'largest':>7} "
        f"{'adjusted':>8}"
    )
    missing = []
    for name in options.model or models.MODELS:
        try:
            case = models.MODELS[name]()
        except ImportError as error:
            missing.append(f"{name}: {error}")
            continue
        _compare(name, compiled_graph(case, options.phase), options)
    print("".join(f"left out, {line}\n" for line in missing), end="")


def _compare(name: str, graph: OpGraph, options: argparse.Namespace) -> None:
    kernels = inductor.kernels_of(graph)
    groups, sizes = our_groups(graph)
    theirs = {op: i for i, k in enumerate(kernels) for op in k.home if is_launched(graph.ops[op])}
    score = Agreement.of(groups, theirs)
    fused = {groups[op] for op in theirs}
    moved = _moved(kernels, set(theirs.values()))
    ours = sum(sizes[i] for i in fused)
    counts = f"{len(fused)}/{sum(not k.extern for k in kernels)}"
    kept = moved["all"] - moved["around"] - moved["again"]
    print(
        f"{name:13} {len(theirs):4} {counts:>8} {score.precision:9.2f} {score.recall:6.2f} "
        f"{score.f1:5.2f} {score.rand:5.2f} {ours / 1e6:7.1f}/{moved['all'] / 1e6:<7.1f} "
        f"{ours / max(moved['all'], 1):5.2f} {moved['around'] / 1e6:7.1f} "
        f"{moved['again'] / 1e6:6.1f} {moved['largest'] / 1e6:7.1f} {ours / max(kept, 1):8.2f}",
        flush=True,
    )
    if options.groups:
        for op in sorted(theirs):
            print(f"  {groups[op]:4} {theirs[op]:4}  {_label(graph, op)}")
    if options.golden:
        _write(name, graph, theirs, moved)


def _moved(kernels: Sequence[inductor.Kernel], homes: Collection[int]) -> dict[str, int]:
    """Bytes of Inductor's kernels: all; around library kernels; read by a first half of an op.

    largest: the most that one such half moves, which is read again right after it.
    """
    halves = [k.bytes - k.around for i, k in enumerate(kernels) if i not in homes]
    return {
        "all": sum(k.bytes for k in kernels),
        "around": sum(k.around for k in kernels),
        "again": sum(halves),
        "largest": max(halves, default=0),
    }


def _label(graph: OpGraph, number: int) -> str:
    op = graph.ops[number]
    shapes = [list(graph.values[i].shape) for i in op.outputs[:1]]
    return f"{number} {op.name} {shapes} {op.module}"


def _write(name: str, graph: OpGraph, theirs: Mapping[int, int], moved: Mapping[str, int]) -> None:
    """Inductor's kernels as lists of "ID NAME", and its bytes, for a test without Inductor."""
    kernels: dict[int, list[str]] = {}
    for op in sorted(theirs):
        kernels.setdefault(theirs[op], []).append(f"{op} {graph.ops[op].name}")
    packages = ["torch", "transformers", *(["diffusers"] if name in models.DIFFUSERS else [])]
    content = {
        "versions": {package: version(package) for package in packages},
        "bytes": moved,
        "kernels": [kernels[number] for number in sorted(kernels)],
    }
    GOLDEN.mkdir(parents=True, exist_ok=True)
    (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
