"""What tests cost in CPU seconds, their processes with them: a plugin that measures each.

Under CI, or with `--costs`, a run ends with the dearest tests and the seconds of each folder, and
a test without the mark `slow` or `heavy` whose call takes more than LIMIT fails: twice the 2 that
CONTRIBUTING.md allows, since the same test costs half as much again on another machine.  It has a
second try, since the first pays for what is imported and made once for all.  What fixtures make is
not counted against a test: they are how tests share it.  On a machine that others use too, a second
of CPU does less, and no test fails for it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

LIMIT = 4.0  # CPU s of the call of a test that is not marked: twice what the rule allows
SHOWN = 20


def cpu_seconds() -> float:
    """CPU s of this process and of those that it waited for."""
    return sum(os.times()[:4])


def _busy() -> bool:
    """Whether more runs here than the workers of one run of tests."""
    return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


class Costs:
    """The plugin: it measures where tests run, and tells where results come together."""

    def __init__(self, config: pytest.Config) -> None:
        self.told = bool(os.environ.get("CI") or config.getoption("--costs"))
        self.began = self.call = 0.0
        self.tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        result = yield
        marked = any(item.get_closest_marker(name) for name in ("slow", "heavy"))
        if self.told and not marked and self.call > LIMIT:
            item._initrequest()  # type: ignore[attr-defined]
            runtestprotocol(item, log=False, nextitem=nextitem)
            if self.call > LIMIT and not _busy():
                self._refuse(item, self.call)
        self.call = 0.0
        return result

    def _refuse(self, item: pytest.Item, seconds: float) -> None:
        said = (
            f"{item.nodeid} takes {seconds:.1f} CPU s, also the second time; a test that is"
            f" not marked takes at most {LIMIT / 2:g}: share what it makes, or mark it"
            " `slow` or `heavy`"
        )
        report = pytest.TestReport(
            item.nodeid, item.location, {}, outcome="failed", longrepr=said, when="teardown"
        )
        item.ihook.pytest_runtest_logreport(report=report)

    def pytest_runtest_logstart(self) -> None:
        self.began = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.began = now - self.began, now
        if report.when == "call":
            self.call = report.cpu_seconds
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.told or not self.tests:
            return
        folders: Counter[str] = Counter()
        for test, seconds in self.tests.items():
            folder = test.partition("::")[0].rpartition("/")[0]
            folders["/".join(folder.split("/")[:2])] += seconds
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds of tests")
        for test, seconds in self.tests.most_common(SHOWN):
            write(f"{seconds:8.1f}  {test}")
        write("")
        for folder, seconds in [*folders.most_common(), ("all", sum(folders.values()))]:
            write(f"{seconds:8.1f}  {folder}")
