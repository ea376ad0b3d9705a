"""The section on the structure of a model: modules, attention, kinds of kernels, wiring."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rooftrace._escapes import visible
from rooftrace.hardware.units import format_count, format_share, plural
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.sections.results import ratio
from rooftrace.reporting.sections.trust import routed

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Anatomy, WiredNode, Wiring
    from rooftrace.reporting.sections.results import Results

PATTERNS_SHOWN, KINDS_SHOWN, CLASSES_SHOWN = 20, 12, 12
LONGEST_NAME = 60
_SPECIAL = re.compile(r"[^\w .,:()\[\]{}*/+=-]")
"""Characters with a meaning in Mermaid or HTML; a label has their codes instead."""


def architecture(results: Results) -> view.Section:
    """The modules with parameters, attention, kinds of kernels, and a diagram of each block."""
    from rooftrace.costmodels.estimates import anatomy

    phase = results.phases[0]
    estimate = results.estimate(phase)
    made = anatomy(estimate)
    source = (
        f"Read from the graph of {phase}, as {estimate.execution.name} runs it; a star stands for "
        "the number of a module in a stack."
    )
    if estimate.processes > 1:
        source += f" Parameters below are those of one of {estimate.processes:,} processes."
    parts: list[view.Part] = [
        *_fingerprint(results, made),
        view.Note(source),
        *_modules(made),
        *_attention(made),
        *_kinds(made),
    ]
    if absent := _absent(results):
        parts.append(view.Note(f"Not in this report: {'; '.join(absent)}."))
    parts += [diagram(wiring) for wiring in made.wirings]
    return view.Section(title="What the model is made of", parts=parts)


def _absent(results: Results) -> list[str]:
    """Sections that this report does not have, each with the reason."""
    estimates = results.broken_down()
    absent = []
    if not routed(results):
        absent.append("routing, since no layer chooses among experts")
    if not any(results.memory[phase].kv for phase in results.memory):
        absent.append("a cache of keys and values, since no step here keeps or reads one")
    if all(estimate.processes == 1 for estimate in estimates):
        absent.append("what goes over links, since one process runs each step")
    if not any(estimate.graph.phase == "training" for estimate in estimates):
        absent.append("gradients and optimizer, since no step trains")
    return absent


def _fingerprint(results: Results, made: Anatomy) -> Iterator[view.Part]:
    """The traits of the model, and the settings of its configuration."""
    traits = [*made.traits]
    routers = dict.fromkeys((row.experts, row.chosen) for row in routed(results))
    told = [f"{experts:,}, {chosen:,} for a token" for experts, chosen in routers]
    traits.append(("routed experts", "; ".join(told) or "none"))
    columns = (
        view.Column("name", units.TEXT, "Trait", of=lambda row: row[0]),
        view.Column("value", units.TEXT, "Kind", of=lambda row: str(row[1])),
    )
    yield view.Table(columns=columns, rows=traits)
    if config := results.model.get("config"):
        columns = (
            view.Column("name", units.CODE, "Setting", of=lambda row: row[0]),
            view.Column("value", units.TEXT, "Value", of=lambda row: str(row[1])),
        )
        yield view.Table(columns=columns, rows=list(config.items()))


def _modules(made: Anatomy) -> Iterator[view.Part]:
    classes = [f"{count:,} {units.CODE.page(kind)}" for kind, count in made.classes]
    if len(classes) > CLASSES_SHOWN:
        others = sum(count for _, count in made.classes[CLASSES_SHOWN:])
        classes = [*classes[:CLASSES_SHOWN], f"{others:,} of other classes"]
    if classes:
        yield view.Note(f"Modules that ran and have no others inside: {', '.join(classes)}.")
    total = sum(entry.params for entry in made.patterns)
    if not total:
        yield view.Note("No module has parameters that the step touches.")
        return
    by_family = (
        view.Column("family", units.TEXT, "Parameters of", of=lambda row: row[0]),
        view.Column("params", units.NUMBER, "Number", of=lambda row: row[1]),
        view.Column("share", units.SHARE, "Share", of=lambda row: ratio(row[1], total)),
    )
    yield view.Table(columns=by_family, rows=made.families)
    pie = [f"  {json.dumps(_label(family))} : {count}" for family, count in made.families]
    yield view.Note("\n".join(["pie title Parameters", *pie]), code="mermaid")
    columns = (
        view.Column("pattern", units.MODULE, "Module"),
        view.Column("kind", units.CODE, "Class", of=lambda p: p.kind or None),
        view.Column("count", units.COUNT, "Modules"),
        view.Column("each", units.NUMBER, "Parameters each", of=lambda p: p.params / p.count),
        view.Column("params", units.NUMBER, "Parameters"),
        view.Column("share", units.SHARE, "Share", of=lambda p: ratio(p.params, total)),
        view.Column("bytes", units.CAPACITY, "Memory"),
    )
    yield view.Table(columns=columns, rows=made.patterns[:PATTERNS_SHOWN])
    rest = made.patterns[PATTERNS_SHOWN:]
    if rest:
        params = sum(entry.params for entry in rest)
        yield view.Note(
            f"{plural(len(rest), 'other kind')} of module with {format_count(params)} parameters, "
            f"{format_share(params / total)}."
        )


def _attention(made: Anatomy) -> Iterator[view.Part]:
    if not made.attention:
        yield view.Note("No attention kernel runs in this step.")
        return
    columns = (
        view.Column("kind", units.TEXT, "Attention"),
        view.Column("heads", units.COUNT, "Heads"),
        view.Column("heads_kv", units.COUNT, "Of keys, values"),
        view.Column("width", units.COUNT, "Query, key width"),
        view.Column("width_values", units.COUNT, "Value width"),
        view.Column("queries", units.COUNT, "Queries"),
        view.Column("keys", units.COUNT, "Keys"),
        view.Column("useful", units.SHARE, "Scores let through"),
        view.Column("count", units.COUNT, "Kernels"),
    )
    yield view.Table(columns=columns, rows=made.attention)


def _kinds(made: Anatomy) -> Iterator[view.Part]:
    total = sum(entry.seconds for entry in made.kernels)
    columns = (
        view.Column("kind", units.TEXT, "Kind of kernel"),
        view.Column("count", units.COUNT, "Kernels"),
        view.Column("seconds", units.SECOND, "Time"),
        view.Column("share", units.SHARE, "Share", of=lambda kind: ratio(kind.seconds, total)),
    )
    yield view.Table(columns=columns, rows=made.kernels[:KINDS_SHOWN])
    rest = made.kernels[KINDS_SHOWN:]
    if rest:
        seconds = sum(entry.seconds for entry in rest)
        yield view.Note(
            f"{plural(len(rest), 'other kind')} with {format_share(ratio(seconds, total))} of the "
            "time."
        )


def elsewhere(results: Results) -> view.Section:
    """Questions that other commands answer for this model, each with its command."""
    graph = results.estimate(results.phases[0]).graph
    target = shlex.quote(str(graph.provenance.get("target") or "TARGET"))
    stored = target if ":" in target else "FILE"  # code makes weights, a configuration has none
    chip = f"--chip {results.chips[0].name}"
    phase = results.phases[-1]
    on = f"{target} {chip} --phase {phase}"
    sizes = "--grid batch=1,8,64 --grid kv=1024,4096" if phase == "decode" else "--grid batch=1,8"
    swept = f"{on} --over batch=1,2,4,8,16,32,64 --format html > sweep.html"
    rows = [
        ("FLOP, bytes and time of every kernel as formulas", f"explain {on}"),
        ("Other batches, lengths and chips, as a page with sliders", f"sweep {swept}"),
        ("What moves the time most", f"sensitivity {on}"),
        ("Every combination of sizes, as CSV", f"sensitivity {on} {sizes} --out grid.csv"),
        ("Shapes of matrix products", f"report {on} --table census"),
        ("Traffic between chips", f"report {target} --system dgx-h200 --mesh tp=8"),
        (
            "Values of weights, as statistics",
            f"inventory {stored} --weights",
        ),
    ]
    if any(results.estimate(name).graph.phase == "decode" for name in results.phases):
        decode = f"solve {target} {chip} --find critical-batch"
        rows.insert(4, ("Batch from which computing limits decode, over devices", decode))
    columns = (
        view.Column("what", units.TEXT, "What", of=lambda row: row[0]),
        view.Column("command", units.CODE, "Command", of=lambda row: f"rooftrace {row[1]}"),
    )
    note = "Each takes the sizes of this report too, as `--seq` and `--dtype`. " + (
        "TARGET: what builds the model, as `model.py:build`." if target == "TARGET" else ""
    )
    table = view.Table(columns=columns, rows=rows)
    return view.Section(title="What other commands show", parts=[table, view.Note(note.strip())])


# -- diagrams ----------------------------------------------------------------------------------


def diagram(wiring: Wiring) -> view.Section:
    """A flowchart of a block in Mermaid, which GitHub, GitLab and many editors draw."""
    name = f" of {units.MODULE.page(wiring.path)}" if wiring.path else ""
    times = f", which stands for {wiring.count:,} that are alike" if wiring.count > 1 else ""
    lines = ["flowchart TD"]
    lines += [f"  {_shape(place, node, wiring)}" for place, node in enumerate(wiring.nodes)]
    lines += [f"  n{a} --> n{b}" for a, b in wiring.edges]
    about = f"The modules{name}{times}, and what each reads; shares are of the forward pass."
    return view.Section(
        title=f"Wiring{name}",
        parts=[view.Note(about), view.Note("\n".join(lines), code="mermaid")],
    )


def _shape(place: int, node: WiredNode, wiring: Wiring) -> str:
    """A node with its label: ops are round, modules are boxes."""
    lines = [_label(node.named(wiring.path))]
    if node.kind:
        lines.append(_label(node.kind + (f" x {node.count:,}" if node.count > 1 else "")))
    if node.output is not None:
        lines.append(_label(str(node.output)))
    if node.share >= 0.005:
        lines.append(_label(format_share(node.share)).replace("%", "#37;"))
    text = "<br/>".join(lines)
    return f'n{place}["{text}"]' if node.kind else f'n{place}(["{text}"])'


def _label(text: str) -> str:
    """Text escaped for a label, and cut."""
    text = words.short_text(visible(text), LONGEST_NAME)
    return _SPECIAL.sub(lambda mark: f"#{ord(mark[0])};", text)
