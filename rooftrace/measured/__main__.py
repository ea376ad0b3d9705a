"""`python3 -m rooftrace.measured`: the measurement suite as a command on a bare GPU machine.

It needs torch, numpy and msgspec.

python3 -m rooftrace.measured --out run.json.gz --budget 480
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

try:
    from rooftrace.measured.bench import (
        MeasureError,
        SuitePlan,
        measure_suite,
        start_again,
        summary,
    )
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"rooftrace: {missing}: the suite needs torch, numpy and msgspec; "
        "`pip install msgspec` brings one wheel that needs nothing else"
    ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 when done, 2 for a request that makes no sense, 130 where stopped."""
    parser = argparse.ArgumentParser(
        prog="rooftrace.measured", description="Measure this device into one file."
    )
    parser.add_argument("names", nargs="*", metavar="TARGET", help="only these models")
    parser.add_argument("--out", help="the file; one that is there is gone on with")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--budget", type=float, help="seconds to spend; default 480, --quick 90")
    parser.add_argument("--quick", action="store_true", help="a trial in about a minute")
    parser.add_argument("--phase", help="of a target, comma-separated; default: all it has")
    parser.add_argument("--batch", type=int, help="of a target")
    parser.add_argument("--seq", type=int, help="sequence length of a target")
    options = parser.parse_args(arguments)
    try:
        plan = SuitePlan.of(
            options.names,
            out=options.out,
            device=options.device,
            budget_s=options.budget,
            quick=options.quick,
            phases=options.phase.split(",") if options.phase else None,
            batch=options.batch,
            seq=options.seq,
        )
        text = summary(measure_suite(plan, _progress, start_again), plan.out)
    except (MeasureError, ValueError, OSError) as error:
        sys.stderr.write(f"rooftrace: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("rooftrace: stopped; the same command goes on\n")
        return 130
    return _print(text)


def _print(text: str) -> int:
    """Print a text; the exit code is 1 where stdout is closed or full."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: closed from the start
        sys.stderr.write(f"rooftrace: cannot write to stdout: {error}\n")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # Python flushes it once more at the end
        return 1
    return 0


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
