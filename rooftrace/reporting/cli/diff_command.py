"""The command diff: two targets, two revisions of one, or one target with different options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    output_options,
    pricing_options,
    workload_options,
)
from rooftrace.reporting.cli.output import complain
from rooftrace.reporting.cli.shared import (
    load_chips,
    load_executions,
    load_rules,
    progress,
    workload,
    write_text,
)

_WAY = "--before or --after"
_PRICING = ("chip", "execution", "tf32", "knobs", "rewrites")
_chip = click.option(
    "--chip", default="h200-sxm", show_default=True, help="A chip by name or TOML path."
)
_execution = click.option(
    "--execution",
    default="efficient",
    show_default=True,
    help="The execution model to compare under.",
)


@click.command(epilog=TARGET_HELP)
@click.argument("targets", nargs=-1, metavar="BEFORE [AFTER]")
@click.option(
    "--git",
    "revision",
    is_flag=False,
    flag_value="",
    metavar="[REV [REV2]]",
    help="Compare REV of one target with REV2, or with the working tree; without REV: where HEAD "
    "left the default branch.  Also REV..REV2 and REV...REV2.",
)
@click.option(
    "--before",
    "before",
    multiple=True,
    metavar="OPTION[=VALUE]",
    help="An option of this command for the side before alone, for example batch=8; or git=REV, "
    "python=PATH.  Repeatable.",
)
@click.option(
    "--after",
    "after",
    multiple=True,
    metavar="OPTION[=VALUE]",
    help="An option for the side after alone.  Repeatable.",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="SIDE=PATH",
    help="Another interpreter for one side (before=PATH, after=PATH), for example with another "
    "torch.  Repeatable.",
)
@click.option(
    "--bisect",
    metavar="METRIC>LIMIT",
    help='With --git: find the first commit at which a metric is beyond it, as in "time>5%", and '
    "show the diff of that commit.",
)
@workload_options
@pricing_options
@click.option(
    "--names",
    nargs=2,
    default=None,
    metavar="BEFORE AFTER",
    help="What to call the two in the output.",
)
@_chip
@_execution
@output_options
@click.option(
    "--fail-on",
    multiple=True,
    metavar="METRIC>LIMIT",
    help='Exit 1 when a metric grows beyond it: "time>5%", "memory>1 GiB".  Metrics: time, '
    "flops, bytes, memory, params, kernels.  Repeatable.",
)
def diff(
    targets: tuple[str, ...],
    revision: str | None,
    before: tuple[str, ...],
    after: tuple[str, ...],
    pythons: tuple[str, ...],
    bisect: str | None,
    names: tuple[str, str] | None,
    form: str,
    out: str | None,
    fail_on: tuple[str, ...],
    rules: tuple[str, ...],
    **options: Any,
) -> None:
    """What changed in cost from BEFORE to AFTER: targets, saved graphs, or revisions of a target.

    One target is enough with --git, or with an option that differs from side to side.
    """
    from rooftrace.costmodels.findings.diffs import parse_condition
    from rooftrace.reporting.text import as_markdown, renderable

    for condition in (*fail_on, *([bisect] if bisect is not None else [])):
        parse_condition(condition)
    sources, revisions = _targets(targets, revision)
    load_rules(rules)
    how = [_side(which, texts, pythons, options) for which, texts in (("before", before),
                                                                     ("after", after))]  # fmt: skip
    pricing = {name: options.pop(name) for name in _PRICING}
    with progress():
        result = rt.diff(
            *sources,
            git=revisions,
            bisect=bisect,
            before=how[0],
            after=how[1],
            names=names,
            **_priced(pricing),
            **workload(**options),
        )
    write_text(form, out, lambda: renderable(result), lambda: as_markdown(result), result.to_dict)
    broken = result.violations(fail_on)
    for sentence in broken:
        complain(sentence)
    if broken:
        sys.exit(1)


def _targets(
    words: Sequence[str], revision: str | None
) -> tuple[tuple[str, str | None], list[str] | bool | None]:
    """The targets of a command, and its revisions, of which a second stands among the words."""
    everything = [*([revision] if revision else []), *words]
    if not everything:
        raise click.UsageError("Missing argument 'BEFORE'.")
    if revision is None:
        if len(words) > 2:
            raise click.UsageError(f"expected one target or two, got {len(words)}")
        return (words[0], words[1] if len(words) == 2 else None), None
    targets = [word for word in everything if _is_target(word)] or everything[-1:]
    revisions = list(everything)
    revisions.remove(targets[0])
    if len(targets) > 1:
        raise click.UsageError(
            f"--git: expected one target and its revisions, got the targets {', '.join(targets)}"
        )
    if len(revisions) > 2:
        raise click.UsageError(f"--git: expected one revision or two, got {', '.join(revisions)}")
    return (targets[0], None), revisions or True


def _is_target(word: str) -> bool:
    """Whether a word names a target and no revision: git allows no colon in the name of one."""
    from rooftrace.tracer.asking import names
    from rooftrace.tracer.graphfiles import looks_saved

    return names.names_code(word) or names.is_config(word) or looks_saved(word) or ":" in word


# -- options of one side ---------------------------------------------------------------------------


@click.command(add_help_option=False)
@workload_options
@pricing_options
@_chip
@_execution
@click.option("--git")
@click.option("--python")
def _of_side(**_: Any) -> None:
    """The options that may differ from side to side: parsed, never run."""


def _side(
    which: str, texts: Sequence[str], pythons: Sequence[str], options: dict[str, Any]
) -> dict[str, Any]:
    """The options of one side, as `rt.diff` takes them.

    options: those of both sides, for what only makes sense together.
    """
    words = []
    for text in texts:
        name, equals, value = text.partition("=")
        words += [f"--{name.lstrip('-')}", *([value] if equals else [])]
    for text in pythons:
        side, equals, path = text.partition("=")
        if not equals or side not in ("before", "after"):
            raise click.UsageError(f"--python {text!r}: expected before=PATH or after=PATH")
        words += ["--python", path] if side == which else []
    try:
        context = _of_side.make_context(f"--{which}", words)
    except click.UsageError as error:
        raise click.UsageError(f"--{which}: {error.format_message()}") from None
    if context.params.pop("rules"):
        raise click.UsageError(f"--{which}: rules hold for both sides; use --rules")
    if context.params.pop("phases"):
        raise click.UsageError(f"--{which}: both sides have the same phases; use --phase")
    own = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    if "execution" in own:  # with what --knobs, --tf32 and --rewrite say for both
        own["execution"] = _priced({**options, "execution": own["execution"]})["execution"]
    usual = {"inputs": (), "assumed": (), "repeats": True}
    made = workload(**{**usual, **own})
    told = {"assume": "assumed"}
    return {name: value for name, value in made.items() if told.get(name, name) in own}


def _priced(pricing: dict[str, Any]) -> dict[str, Any]:
    """The chip and the execution model of pricing options."""
    (chip,) = load_chips((pricing["chip"],))
    (execution,) = load_executions(
        (pricing["execution"],), pricing["tf32"], pricing["knobs"], pricing["rewrites"]
    )
    return {"chip": chip, "execution": execution}
