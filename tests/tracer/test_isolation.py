"""Targets are built from their own files, as these are now."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftrace.errors import TargetError
from rooftrace.tracer.api import trace_target
from rooftrace.tracer.request import Request
from rooftrace.tracer.targets.isolation import Kept, keeping

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files below the temporary folder, all with one time: as edits within a second."""

    def files(**texts: str) -> None:
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/")
            path = path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (1_000_000_000, 1_000_000_000))

    return files


def width_of(target: str) -> int:
    """The width of what a target's module puts out."""
    graph = trace_target(target, ["forward"])["forward"]
    return graph.values[graph.outputs[0]].shape[-1]


def model(line: str, width: str = "WIDTH") -> str:
    """A linear layer as wide as what `line` imports says."""
    return (
        f"import torch\n{line}\n"
        f"def build():\n    return torch.nn.Linear(4, {width}), (torch.ones(2, 4),)\n"
    )


def test_two_checkouts_have_neighbours_of_their_own(write: Write, tmp_path: Path) -> None:
    for name, width in (("old", 8), ("new", 9)):
        write(
            **{
                f"{name}__model": model("from sizes import WIDTH"),
                f"{name}__sizes": f"WIDTH = {width}",
            }
        )
    widths = [width_of(f"{tmp_path}/{name}/model.py:build") for name in ("old", "new", "old")]
    assert widths == [8, 9, 8]
    assert "sizes" not in sys.modules and str(tmp_path / "old") not in sys.path


def test_an_edit_of_the_same_size_and_second_is_seen(write: Write, tmp_path: Path) -> None:
    for width in (8, 9, 7):
        write(model=model("from sizes import WIDTH"), sizes=f"WIDTH = {width}")
        assert width_of(f"{tmp_path}/model.py:build") == width


def test_a_stale_bytecode_file_is_not_read(write: Write, tmp_path: Path) -> None:
    import py_compile

    write(model=model("from sizes import WIDTH"), sizes="WIDTH = 8")
    py_compile.compile(str(tmp_path / "sizes.py"))
    write(sizes="WIDTH = 9")
    assert width_of(f"{tmp_path}/model.py:build") == 9


def test_what_the_user_imported_stays_the_users(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(model=model("from isolated_sizes import WIDTH"), isolated_sizes="WIDTH = 8")
    mine = importlib.import_module("isolated_sizes")
    write(isolated_sizes="WIDTH = 9")
    assert width_of(f"{tmp_path}/model.py:build") == 9
    assert sys.modules["isolated_sizes"] is mine and mine.WIDTH == 8
    del sys.modules["isolated_sizes"]


def test_a_module_of_another_folder_does_not_hide_one_of_the_target(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(mine__isolated_utils="WIDTH = 8", target__isolated_utils="WIDTH = 9")
    write(target__model=model("from isolated_utils import WIDTH"))
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    mine = importlib.import_module("isolated_utils")
    assert width_of(f"{tmp_path}/target/model.py:build") == 9
    assert sys.modules.pop("isolated_utils") is mine


def test_packages_namespaces_and_helpers_beside_the_target(write: Write, tmp_path: Path) -> None:
    sibling = (
        "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), '../lib'))\n"
    )
    for name, n in (("old", 8), ("new", 9)):
        write(
            **{
                f"{name}__src__package": model("from parts.sizes import WIDTH"),
                f"{name}__src__namespace": model("from bare.deep.sizes import WIDTH"),
                f"{name}__src__sibling": model(sibling + "from helpers import WIDTH"),
                f"{name}__src__parts__sizes": f"WIDTH = {n}",
                f"{name}__src__bare__deep__sizes": f"WIDTH = {n}",
                f"{name}__lib__helpers": f"WIDTH = {n}",
            }
        )
    (tmp_path / "old/src/parts/__init__.py").write_text("from .sizes import WIDTH\n")
    (tmp_path / "new/src/parts/__init__.py").write_text("from .sizes import WIDTH\n")
    for kind in ("package", "namespace", "sibling"):
        widths = [width_of(f"{tmp_path}/{name}/src/{kind}.py:build") for name in ("old", "new")]
        assert widths == [8, 9], kind


def test_a_file_of_a_package_may_import_relatively(write: Write, tmp_path: Path) -> None:
    for name, n in (("old", 8), ("new", 9)):
        write(
            **{
                f"{name}__net__model": model("from .sizes import WIDTH"),
                f"{name}__net__sizes": f"WIDTH = {n}",
            }
        )
        (tmp_path / name / "net/__init__.py").write_text("from .model import build\n")
    assert [width_of(f"{tmp_path}/{name}/net/model.py:build") for name in ("old", "new")] == [8, 9]


def test_a_package_is_that_of_the_working_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    for name, n in (("old", 8), ("new", 9)):
        write(
            **{
                f"{name}__net__model": model("from net.sizes import WIDTH"),
                f"{name}__net__sizes": f"WIDTH = {n}",
            }
        )
        (tmp_path / name / "net/__init__.py").write_text("")
        monkeypatch.chdir(tmp_path / name)
        widths.append(width_of("net.model:build"))
    write(new__net__sizes="WIDTH = 7")
    assert [*widths, width_of("net.model:build")] == [8, 9, 7]
    assert not any(name.partition(".")[0] == "net" for name in sys.modules)


def test_a_link_is_followed_to_where_it_points_now(write: Write, tmp_path: Path) -> None:
    widths = []
    for name, n in (("first", 8), ("second", 9)):
        write(
            **{f"{name}__model": model("from sizes import WIDTH"), f"{name}__sizes": f"WIDTH = {n}"}
        )
        (tmp_path / "current").unlink(missing_ok=True)
        (tmp_path / "current").symlink_to(tmp_path / name)
        widths.append(width_of(f"{tmp_path}/current/model.py:build"))
    assert widths == [8, 9]


def test_what_a_forward_imports_is_the_targets_too(write: Write, tmp_path: Path) -> None:
    code = (
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        from late import WIDTH\n        return x.new_zeros(2, WIDTH) + x.sum()\n"
        "def build():\n    return Net(), (torch.ones(2, 4),)\n"
    )
    for name, n in (("old", 8), ("new", 9)):
        write(**{f"{name}__model": code, f"{name}__late": f"WIDTH = {n}"})
    assert [width_of(f"{tmp_path}/{name}/model.py:build") for name in ("old", "new")] == [8, 9]


def test_a_finder_before_ours_may_ask_it(write: Write, tmp_path: Path) -> None:
    write(model=model("import sizes", "sizes.WIDTH"), sizes="WIDTH = 8")
    text = (tmp_path / "model.py").read_text()
    write(model=text.replace("build():\n", "build():\n    import late\n"), late="")
    assert width_of(f"{tmp_path}/model.py:build") == 8  # capture has a finder of its own then


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "place", ["src__mine__model", "mine__model", "examples__model", "examples__deep__model"]
)
def test_a_checkouts_own_package_comes_before_an_installed_one(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, whole: bool
) -> None:
    where = "mine" if place == "mine__model" else "src__mine"
    for name, width in (("old", 8), ("new", 9)):
        write(
            **{
                f"{name}__{where}__sizes": f"WIDTH = {width}",
                f"{name}__setup": "",
                f"{name}__{place}": model("from mine.sizes import WIDTH"),
            }
        )
        if whole:
            (tmp_path / name / where.replace("__", "/") / "__init__.py").write_text("")
    installed = tmp_path / "old" / where.replace("__", "/")
    monkeypatch.syspath_prepend(str(installed.parent))
    file = place.replace("__", "/")
    widths = [width_of(f"{tmp_path}/{name}/{file}.py:build") for name in ("old", "new", "old")]
    assert widths == [8, 9, 8]


def test_a_package_without_init_is_found_above_its_file(write: Write, tmp_path: Path) -> None:
    for name, width in (("old", 8), ("new", 9)):
        write(
            **{
                f"{name}__proj__nets__model": model("from proj.sizes import WIDTH"),
                f"{name}__proj__sizes": f"WIDTH = {width}",
            }
        )
    widths = [width_of(f"{tmp_path}/{n}/proj/nets/model.py:build") for n in ("old", "new")]
    assert widths == [8, 9]


def test_an_environments_own_module_stays_imported_and_an_edit_is_seen(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(src__model=model("from isolated_lib import WIDTH"), lib__isolated_lib="WIDTH = 8")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    target, seen = f"{tmp_path}/src/model.py:build", []
    for width in (8, 8, 9, 9, 7, 8):
        write(lib__isolated_lib=f"WIDTH = {width}")
        assert width_of(target) == width
        seen.append(sys.modules["isolated_lib"])
    assert len(set(map(id, seen))) == 1, "what others may hold is not replaced"
    del sys.modules["isolated_lib"]


def test_an_edit_beside_the_target_of_what_the_user_imported_is_seen(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(src__model=model("from isolated_more import WIDTH"), lib__isolated_more="WIDTH = 8")
    write(src__other=model("", "3"))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    mine = importlib.import_module("isolated_more")
    assert width_of(f"{tmp_path}/src/other.py:build") == 3  # any target: the file is looked at
    write(lib__isolated_more="WIDTH = 9")
    assert width_of(f"{tmp_path}/src/model.py:build") == 9
    assert sys.modules.pop("isolated_more") is mine


def test_a_file_read_at_import_is_read_again(write: Write, tmp_path: Path) -> None:
    line = "import os\nWIDTH = int(open(os.path.join(os.path.dirname(__file__), 'w.txt')).read())"
    write(model=model("from sizes import WIDTH"), sizes=line)
    for width in (8, 9):
        (tmp_path / "w.txt").write_text(str(width))
        assert width_of(f"{tmp_path}/model.py:build") == width


ONCE = (
    "import torch\n"
    "library = torch.library.Library('NAME', 'FRAGMENT')\n"
    "torch.library.define('NAME::mix', '(Tensor x) -> Tensor')\n"
    "WIDTH = 8\n"
)


def test_code_that_can_be_imported_once_is_built_several_times_in_one_call(
    write: Write, tmp_path: Path
) -> None:
    write(model=model("from ops import WIDTH"), ops=ONCE.replace("NAME", "isolated_kept"))
    target = f"{tmp_path}/model.py:build"
    with keeping(Kept()):
        for batch in (1, 3):
            graph = trace_target(target, ["forward"], Request(batch=batch))["forward"]
            assert graph.values[graph.outputs[0]].shape == (batch, 8)
    with pytest.raises(TargetError, match="register an operator"):
        trace_target(target, ["forward"])  # here, where no process of its own is allowed


@pytest.mark.slow
@pytest.mark.subprocess
def test_code_that_can_be_imported_once_goes_to_a_process_of_its_own(
    write: Write, tmp_path: Path
) -> None:
    """Also: what another process raises comes back as it was raised."""
    import rooftrace as rt

    for name, n in (("old", 8), ("new", 9)):
        ops = ONCE.replace("NAME", "isolated_apart").replace("WIDTH = 8", f"WIDTH = {n}")
        write(**{f"{name}__model": model("from ops import WIDTH"), f"{name}__ops": ops})
    before, after = (f"{tmp_path}/{name}/model.py:build" for name in ("old", "new"))
    change = rt.diff(before, after, phases=["forward"]).phases[0].totals["params"]
    assert (change.before, change.after) == (4 * 8 + 8, 4 * 9 + 9)
    assert width_of(before) == 8
    assert width_of(after) == 9  # the second that defines the op: not in this process
    with pytest.raises(TargetError, match="there is no 'bild'; there are WIDTH, build"):
        rt.diff(before, f"{tmp_path}/new/model.py:bild")
