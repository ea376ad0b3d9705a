"""What every test may use, in which order they run, and what is looked at after each."""

import difflib
import gc
import getpass
import inspect
import itertools
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.costs import Costs
from tests.left_behind import LeftBehind

GOLDEN = Path(__file__).parent / "golden"

# How long an example takes, or is made, says nothing: machines are loaded.  `make test` tries the
# same examples each time; `pytest --hypothesis-profile explore` tries others, and more of them
# where a test does not say how many.
settings.register_profile(
    "rooftrace",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("rooftrace"), derandomize=False, max_examples=500
)
settings.load_profile("rooftrace")

# A worker holds the modules of torch and transformers and what thousands of tests keep: walking
# through all of it as often as Python does by itself took a sixth of the time of all tests.
gc.set_threshold(200_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden/ from what the code says now; runs only the tests that use it",
    )
    parser.addoption(
        "--costs", action="store_true", help="end with the CPU seconds of tests, as under CI"
    )
    parser.addoption(
        "--shuffle", type=int, help="run files, and the tests of each, in the order of this seed"
    )
    parser.addoption(
        "--fuzz-seconds", type=float, default=0.5, help="how long each attacker of tests/fuzz tries"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Traces that forms keep are of this run and of all its processes, temporary files of one."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["ROOFTRACE_CACHE"] = str(shared / "traces")
    # What Inductor compiles stays where it always does, and so do torch's headers, for which it
    # looks below the temporary folder: the first of them take ten seconds.
    inductor = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    inductor.mkdir(exist_ok=True)
    temporary = base / "temporary"
    temporary.mkdir()
    (temporary / inductor.name).symlink_to(inductor, target_is_directory=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    for plugin in (Costs(config), LeftBehind()):
        config.pluginmanager.register(plugin)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        chance = random.Random(seed)
        places = {path: chance.random() for path in sorted({item.path for item in items})}
        chance.shuffle(items)
        items.sort(key=lambda item: places[item.path])
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if not config.getoption("--update-golden"):
        return
    writers = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in writers])
    items[:] = writers


@pytest.fixture(autouse=True)
def one_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would run in a process of its own runs in this one, unless the test is about that."""
    if request.node.get_closest_marker("subprocess") is None:
        monkeypatch.setattr("rooftrace.tracer.phases.apart.PROCESSES", False)


@pytest.fixture(autouse=True)
def no_target_stays() -> Iterator[None]:
    """Imports of a target that a test loaded end with it, not with the next target; and so does
    that a command ran files of --rules, after which a process keeps no trace."""
    yield
    if extensions := sys.modules.get("rooftrace._extensions"):
        extensions.RUN.clear()
    isolation = sys.modules.get("rooftrace.tracer.targets.isolation")
    if isolation is not None and isolation._LEFT:
        with isolation.own_imports():
            pass


def forget_accelerate() -> None:
    """Drop what accelerate was told of this process, and keeps for all of it."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


@pytest.fixture
def no_accelerator_stays() -> Iterator[None]:
    """The state that accelerate keeps begins and ends with the test."""
    forget_accelerate()
    yield
    forget_accelerate()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]


def mostly_heavy(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """The cases of a sweep for `parametrize`: those to keep as they are, the others marked heavy.

    `make test` leaves out what is heavy, `make heavy` runs it.  A name in `keep` that is no case is
    an error: nothing would stand for the sweep.
    """
    every = list(cases)
    if missing := [case for case in keep if case not in every]:
        raise ValueError(f"{missing[0]!r} is no case of this sweep; name one of {every}")
    if not keep:
        raise ValueError("keep at least one case of a sweep in `make test`")
    return [
        case
        if case in keep
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.heavy)
        for case in every
    ]


def in_turn(*axes: Iterable[Any], keep: Collection[Any] = ()) -> list[Any]:
    """Every combination of these axes for `parametrize`; `make test` runs few of them.

    It runs as many as the longest axis has values, the other axes in turn, so that each value of
    each axis is in one; and those to keep, which take a way of their own.
    """
    values = [list(axis) for axis in axes]
    longest = range(max(map(len, values)))
    few = [tuple(axis[n % len(axis)] for axis in values) for n in longest]
    return mostly_heavy(itertools.product(*values), [*few, *keep])


def rotary_product(length: int, width: int) -> int:
    """FLOP of the angles of rotary positions, which transformers made by an outer product once."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    outer = " @ " in inspect.getsource(LlamaRotaryEmbedding.forward)
    return 2 * length * (width // 2) if outer else 0


def pinned(library: str) -> str:
    """The version in constraints.txt, for the newest Python: goldens are made with it."""
    pins = (GOLDEN.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    found: str = re.findall(rf"^{library}==([\d.]+)", pins, re.MULTILINE)[-1]
    return found


def unlike(library: str) -> bool:
    """Whether another release of a library is here than goldens are made with; fixes aside."""
    try:
        here = version(library)
    except PackageNotFoundError:
        return True
    return here.split(".")[:2] != pinned(library).split(".")[:2]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(name, text)` holds `text` against tests/golden/<name>; `make golden` rewrites it.

    models_of: libraries whose models it is about, if any.  Their other releases may run other ops:
    there a text that differs says nothing, and the test is skipped.
    """

    def compare(name: str, text: str, models_of: Sequence[str] = ()) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        if not path.exists():
            pytest.fail(f"no tests/golden/{name} yet: run `make golden`, read it, commit it")
        expected = path.read_text(encoding="utf-8")
        for library in models_of if text != expected else ():
            if unlike(library):
                pytest.skip(f"golden/{name} is made with {library} {pinned(library)}")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"tests/golden/{name}", "now", lineterm=""
            )
            advice = "If this change is meant: `make golden`, and commit the diff."
            pytest.fail("\n".join([*diff, "", advice]), pytrace=False)

    return compare


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """How long an attacker tries."""
    return float(request.config.getoption("--fuzz-seconds"))


def ctrl_c_works() -> None:
    """For `preexec_fn`: what a shell runs in the background ignores Ctrl-C, with all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
