"""docs/versions.md: which releases of Python, torch and transformers the quick tests ran with.

    python benchmarks/releases/matrix.py --venvs FOLDER [--jobs N] [--only TEXT] [--reports]
    make versions VENVS=FOLDER

Each row of releases.toml gets a virtual environment in FOLDER, about 7 GB where torch comes with
CUDA, and all quick tests are run in it.  An environment that is there is used again.  A Python that
this machine lacks leaves its row without a result, and the page says so.  The page is written once,
after the last row; with --only nothing is written.  Rows that were run one by one make a page by
--reports.  The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rooftrace._writing import write_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "versions.md"
CELL = 160
"""The most characters of a reason in a table."""

HEAD = """# Which releases were run

The tests that are neither `slow` nor `heavy`, all of them, in one fresh environment for each row.
`make versions VENVS=folder` makes the environments and writes this page; the rows come from
[releases.toml](../benchmarks/releases/releases.toml). The first row holds the floors of
`pyproject.toml`. Goldens that hold ops of a library's model are made with the releases in
`constraints.txt`, and skipped with others.

## A new release of torch

    pip install torch==2.16.0 && python -m rooftrace.tracer.torch_private

says which of the private names of torch that rooftrace uses are gone, and is silent where all are
there: [torch_private.py](../rooftrace/tracer/torch_private.py) lists them. Then give the release a
row in releases.toml and run `make versions VENVS=folder ONLY=torch2.16`."""


@dataclass(frozen=True)
class Environment:
    """A combination of releases."""

    python: str  # such as 3.12
    torch: str  # an exact version, as that of transformers
    transformers: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"py{self.python}-torch{self.torch}-transformers{self.transformers}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the quick tests said in an environment."""

    environment: Environment
    missing: str = ""  # why nothing was run, or empty
    python: str = ""  # the full version that ran
    passed: int = 0
    day: str = ""
    failed: tuple[str, ...] = ()  # names of tests
    skipped: Mapping[str, int]  # by reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows and write the page; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venvs", type=Path, required=True, help="a folder of environments")
    parser.add_argument("--jobs", default="2", help="processes of pytest")
    parser.add_argument("--only", default="", help="rows whose name holds this; writes no page")
    parser.add_argument(
        "--reports", action="store_true", help="run nothing: take the reports of earlier runs"
    )
    asked = parser.parse_args(arguments)
    rows = [row for row in environments() if asked.only in row.name]
    if not rows:
        names = ", ".join(row.name for row in environments())
        parser.error(f"--only {asked.only!r}: no row has this in its name; there are {names}")
    results = []
    for row in rows:
        venvs = asked.venvs.resolve()
        result = earlier(row, venvs) if asked.reports else run(row, venvs, asked.jobs)
        print(f"{row.name}: {summary(result)}", flush=True)
        for name in result.failed:
            print(f"  failed: {name}")
        results.append(result)
    if not asked.only:
        write_bytes(PAGE, page(results).encode())
        print(f"written to {PAGE.relative_to(ROOT)}")
    return int(any(result.failed for result in results))


def environments() -> list[Environment]:
    """The rows of releases.toml."""
    table = tomllib.loads((HERE / "releases.toml").read_text(encoding="utf-8"))
    return [Environment(**row) for row in table["environment"]]


# -- one environment -------------------------------------------------------------------------------


def run(row: Environment, venvs: Path, jobs: str) -> Result:
    """Make an environment and run the quick tests in it."""
    python = interpreter(row.python)
    if python is None:
        return Result(environment=row, missing=f"no Python {row.python} here", skipped={})
    inside = venvs / row.name / "bin" / "python"
    print(f"{row.name}: in {venvs / row.name}", flush=True)
    if not inside.exists():
        subprocess.run([python, "-m", "venv", venvs / row.name], check=True)
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "pip", "setuptools>=77", "wheel"], check=True)
    releases = [f"torch=={row.torch}", f"transformers=={row.transformers}", "build"]
    extras = [*pip, "--no-build-isolation", "--editable", f"{ROOT}[hf,compare,fleet,test]"]
    subprocess.run([*extras, *releases], check=True)
    report = venvs / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pytest = [inside, "-m", "pytest", "-p", "no:benchmark", "-q", "--no-header", "--tb=short"]
    quick = [*pytest, "-m", "not slow and not heavy", "-n", jobs, f"--junitxml={report}"]
    with open(venvs / f"{row.name}.log", "w", encoding="utf-8") as log:
        subprocess.run(quick, cwd=ROOT, env=os.environ | quiet, stdout=log, stderr=log, check=False)
    if not report.exists():
        sys.exit(f"{row.name}: pytest did not finish; {venvs / row.name}.log says why")
    return read(row, report, release_of(inside))


def release_of(python: Path) -> str:
    """The full version of a Python."""
    asked = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.check_output(asked, text=True).strip()


def earlier(row: Environment, venvs: Path) -> Result:
    """What an earlier run in this environment said."""
    report, inside = venvs / f"{row.name}.xml", venvs / row.name / "bin" / "python"
    if report.exists() and inside.exists():
        return read(row, report, release_of(inside))
    if interpreter(row.python) is None:
        return Result(environment=row, missing=f"no Python {row.python} here", skipped={})
    sys.exit(f"{row.name}: no report in {venvs}; run it first: --only {row.name}")


def interpreter(version: str) -> str | None:
    """A Python of a version: on the path, or of pyenv."""
    there = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(there[-1]) if there else shutil.which(f"python{version}")


def read(row: Environment, report: Path, python: str) -> Result:
    """The counts in a report of pytest."""
    failed: list[str] = []
    skipped: dict[str, int] = defaultdict(int)
    passed = 0
    for case in ET.parse(report).iter("testcase"):
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
        elif reason is not None:
            skipped[reason.get("message", "")] += 1
        else:
            passed += 1
    return Result(
        environment=row,
        python=python,
        passed=passed,
        day=date.fromtimestamp(report.stat().st_mtime).isoformat(),
        failed=tuple(failed),
        skipped=dict(skipped),
    )


# -- the page --------------------------------------------------------------------------------------


def summary(result: Result) -> str:
    """A line on a result."""
    if result.missing:
        return result.missing
    skipped = sum(result.skipped.values())
    return f"{result.passed} passed, {len(result.failed)} failed, {skipped} skipped"


def page(results: Sequence[Result]) -> str:
    """The text of docs/versions.md."""
    lines = [
        HEAD,
        "",
        "## The rows",
        "",
        "| Python | torch | transformers | passed | failed | skipped | run on |",
    ]
    lines.append("|---|---|---|---:|---:|---:|---|")
    for result in results:
        row = result.environment
        counts = f"{result.passed} | {len(result.failed)} | {sum(result.skipped.values())}"
        told = f"{result.missing} | |" if result.missing else counts
        python = result.python or row.python
        lines.append(f"| {python} | {row.torch} | {row.transformers} | {told} | {result.day} |")
    failed = [(result, name) for result in results for name in result.failed]
    if failed:
        lines += ["", "## What fails", ""]
        lines += [f"- {releases(result.environment)}: `{name}`" for result, name in failed]
    return "\n".join([*lines, *skips(results), ""])


def skips(results: Sequence[Result]) -> list[str]:
    """A table of the reasons why tests were skipped, in the order of the rows."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for result in results:
        for reason, count in sorted(result.skipped.items()):
            by_reason[reason].append(f"{releases(result.environment)} ({count})")
    if not by_reason:
        return []
    lines = ["", "## What is skipped, and where", "", "| Reason | torch / transformers (tests) |"]
    lines.append("|---|---|")
    for reason, where in by_reason.items():
        short = " ".join(reason.replace("|", "\\|").split())
        short = short if len(short) <= CELL else short[: CELL - 1] + "…"
        lines.append(f"| {short} | {', '.join(where)} |")
    return lines


def releases(row: Environment) -> str:
    """The libraries of a row."""
    return f"{row.torch} / {row.transformers}"


if __name__ == "__main__":
    sys.exit(main())
