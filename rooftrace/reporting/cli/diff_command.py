"""The commands `diff`, of targets, revisions or checkpoints, and `inventory`, of weights."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    click_option,
    complain,
    names_option,
    other_options,
    typed,
)
from rooftrace.reporting.cli.shared import CommandOutput, command, once, progress, results
from rooftrace.reporting.commands import options
from rooftrace.reporting.commands.calls import CALLS
from rooftrace.reporting.commands.options import Option

_HELP = f"""{TARGET_HELP}  It may also be a checkpoint: a file of safetensors or torch.save,
the index.json of a sharded one, or a folder with one."""


@command(
    "inventory",
    epilog=_HELP,
    results=results("data", plot="Draw a histogram of each tensor; reads the values."),
)
@click.argument("target")
@click.option(
    "--against", metavar="OTHER", help="Parameters of TARGET and of OTHER, module by module."
)
def inventory(
    target: str, against: str | None, output: CommandOutput, arguments: dict[str, Any]
) -> None:
    """List the tensors of TARGET: parameters, memory, statistics."""
    if against is not None and ("weights" in arguments or output.plot):
        raise RequestError(
            "--against compares numbers of parameters: leave --weights and --plot out, or compare "
            "the values of two checkpoints with `rooftrace diff`"
        )
    result: Any
    with progress():
        result = rt.inventory(target, plot=output.plot, **arguments)
        if against is not None:
            result = rt.diff(result, rt.inventory(against, weights=False, **arguments))
    output.write(result, drawn="weights drawn")


def check_checkpoints(fail_on: tuple[str, ...]) -> None:
    """Raise RequestError for an option of `rooftrace diff` that does not fit two checkpoints."""
    from rooftrace.weights import CheckpointDiff

    unused = other_options("words", "names", "form", "out", "fail_on")
    if unused:
        raise RequestError(
            f"{', '.join(unused)}: a checkpoint has weights, and no step that is run; name its "
            "config.json to compare costs"
        )
    CheckpointDiff.limits(fail_on)


# -- diff command ----------------------------------------------------------------------------------
# The command diff: two targets, two revisions of one, or one target with different options.


@command(
    "diff",
    defaults={
        "chip": "h200-sxm; of measured runs their device",
        "execution": "efficient; of measured runs the one that they ran under",
    },
    results=results("data", timeline=True),
)
@click.argument("words", nargs=-1, metavar="BEFORE [AFTER]")
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
    help="An option of this command for BEFORE alone, for example batch=8; or git=REV, "
    "python=PATH.  Repeatable.",
)
@click.option(
    "--after",
    "after",
    multiple=True,
    metavar="OPTION[=VALUE]",
    help="An option of this command for AFTER alone.  Repeatable.",
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
@names_option()
@click.option(
    "--target",
    "targets",
    type=options.words,
    metavar="TARGET[,TARGET]",
    help="The targets of measured runs, to predict the difference: one for both, or one each.",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="METRIC>LIMIT",
    help='Exit 1 when a metric grows beyond it: "time>5%", "memory>1 GiB".  Metrics: time, '
    "flops, bytes, memory, params, kernels; of measured runs time, device, idle, exposed, work, "
    "kernels, memory ...; of checkpoints drift, params, bytes, nonfinite, changed, added, "
    "removed.  Repeatable.",
)
def diff(
    words: tuple[str, ...],
    revision: str | None,
    before: tuple[str, ...],
    after: tuple[str, ...],
    pythons: tuple[str, ...],
    bisect: str | None,
    names: tuple[str, ...] | None,
    targets: tuple[str, ...] | None,
    output: CommandOutput,
    fail_on: tuple[str, ...],
    arguments: dict[str, Any],
) -> None:
    """Show the change in cost, measured time or weights.

    BEFORE and AFTER are targets or saved graphs, revisions go to --git; one target is enough with
    --git, or with an option that differs from side to side.  For measured time they are traces of
    torch.profiler or run files of `rooftrace measure`, and one alone shows where its time goes; for
    weights, checkpoints of safetensors or torch.save.
    """
    from rooftrace.diffs.runs import is_measured
    from rooftrace.tracer.names import are_weights

    sources, revisions = _targets(words, revision)
    if are_weights(*sources):
        check_checkpoints(fail_on)
    else:
        limits = [*fail_on, *filter(None, [bisect])]
        _check(any(map(is_measured, sources)), targets, limits, output)
    named: dict[str, Any] = {"names": names, **({"graphs": targets} if targets else {})}
    with once():
        result = rt.diff(
            *sources,
            git=revisions,
            bisect=bisect,
            before=_side("before", before, pythons),
            after=_side("after", after, pythons),
            **named,
            **arguments,
        )
    output.write(result)
    broken = result.violations(fail_on)
    for sentence in broken:
        complain(sentence)
    if broken:
        sys.exit(1)


def _check(
    measured: bool, targets: Sequence[str] | None, limits: Sequence[str], output: CommandOutput
) -> None:
    """Raise the error of an option that does not fit two graphs, or two measured runs."""
    from rooftrace.diffs.costs import Diff
    from rooftrace.diffs.runs import RunDiff

    (RunDiff if measured else Diff).limits(limits)
    if measured and output.timeline is not None:
        raise click.UsageError(
            f"--timeline {output.timeline}: measured runs have timelines of their own; it is for "
            "predicted steps"
        )
    if targets is not None and not measured:
        raise click.UsageError(
            f"--target {','.join(targets)}: it says what measured runs ran, and neither BEFORE nor "
            "AFTER is one"
        )
    if targets is not None and not 1 <= len(targets) <= 2:
        raise click.UsageError("--target: expected one target, or two with a comma between them")


def _targets(
    words: Sequence[str], revision: str | None
) -> tuple[tuple[str, str | None], list[str] | bool | None]:
    """The targets of a command, and its revisions, of which a second stands among the words."""
    everything = [*([revision] if revision else []), *words]
    if not everything:
        raise click.UsageError("Missing argument 'BEFORE'.")
    if revision is None:
        told = _revisions(words) if len(words) > 1 else []
        if len(words) > 2 or told:
            target = next((word for word in words if word not in told), "TARGET")
            raise click.UsageError(
                f"expected one target or two, got {', '.join(words)}; revisions of one go to "
                f"--git: rooftrace diff {shlex.join([target, '--git', *(told or ['REV', 'REV2'])])}"
            )
        return (words[0], words[1] if len(words) == 2 else None), None
    from rooftrace.tracer import names

    script = next((place for place, word in enumerate(everything) if names.is_script(word)), None)
    if script is not None and script + 1 < len(everything):  # the rest is the script's
        everything[script:] = [f"{everything[script]} {shlex.join(everything[script + 1 :])}"]
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
    from rooftrace.graph import looks_saved
    from rooftrace.tracer import names

    return names.names_code(word) or names.is_config(word) or looks_saved(word) or ":" in word


def _revisions(words: Sequence[str]) -> list[str]:
    """The words that name revisions of the repository of the target among them, and no file."""
    from rooftrace.diffs.git import RevisionError, repositories

    target = next(filter(_is_target, words), "")
    folder = os.path.abspath(os.path.dirname(target.rpartition(":")[0] or target))
    revisions = []
    with suppress(RevisionError):
        repository = repositories.repository_at(folder)
        for word in words:
            with suppress(RevisionError):
                if not _is_target(word) and not os.path.exists(word):
                    revisions += [word] if repository.commit_hash(word.partition("..")[0]) else []
    return revisions


# -- options of one side ---------------------------------------------------------------------------


_SIDE_OPTIONS = {
    each.name: each
    for each in (
        *CALLS["diff"].options(),
        Option(name="git", help="A revision of one side."),
        Option(name="python", help="The interpreter of one side."),
    )
}
"""The options that may differ from side to side."""


def _side(which: str, texts: Sequence[str], pythons: Sequence[str]) -> dict[str, Any] | None:
    """The options of one side, as `rt.diff` takes them; None for a side without any."""
    words = []
    for text in texts:
        name, equals, value = text.partition("=")
        if name.lstrip("-") == "rules":
            raise click.UsageError(f"--{which}: rules hold for both sides; use --rules")
        words += [f"--{name.lstrip('-')}", *([value] if equals else [])]
    for text in pythons:
        side, equals, path = text.partition("=")
        if not equals or side not in ("before", "after"):
            raise click.UsageError(f"--python {text!r}: expected before=PATH or after=PATH")
        words += ["--python", path] if side == which else []
    command = click.Command(
        which, params=list(map(click_option, _SIDE_OPTIONS.values())), add_help_option=False
    )
    try:
        arguments = typed(command.make_context(f"--{which}", words), _SIDE_OPTIONS)
    except click.UsageError as error:
        raise click.UsageError(f"--{which}: {error.format_message()}") from None
    if "phases" in arguments:
        raise click.UsageError(f"--{which}: both sides have the same phases; use --phase")
    return arguments or None
