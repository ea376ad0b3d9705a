"""From a clean copy of the checkout: sdist, wheel from that sdist, fresh environment, import."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

ROOT = Path(__file__).resolve().parents[1]
LINKS = {"tracer", "costmodels", "hardware", "measured", "reporting"}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command to its end and return what it printed; everything it said, if it failed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def clean_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of this working tree would hold: nothing that git ignores, links as links."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("clone")
    listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listing.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_symlink() or source.is_file():  # neither: deleted, and not committed yet
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    assert all((copy / link).is_symlink() for link in LINKS)
    return copy


@pytest.fixture(scope="module")
def built(clean_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it (not from the checkout)."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=clean_copy)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_the_sdist_leaves_the_links_out(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert LINKS.isdisjoint(member.name.split("/")[1] for member in members if "/" in member.name)


def test_the_wheel_has_one_top_level_name_and_all_that_the_package_reads(
    built: tuple[Path, Path], clean_copy: Path
) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rooftrace"}

    package = clean_copy / "rooftrace"
    files = {
        path.relative_to(clean_copy).as_posix() for path in package.rglob("*") if path.is_file()
    }
    assert {name for name in files if "/chips/" in name}, "no chip file in the checkout"
    assert {name for name in names if name.startswith("rooftrace/")} == files


def test_the_wheel_works_in_a_fresh_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    fresh = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", fresh, cwd=tmp_path)
    scripts = fresh / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "--quiet"]
    run(*pip, "install", "--no-deps", "--no-index", built[1], cwd=tmp_path)

    # The libraries are those of this environment. Through PYTHONPATH no .pth file is read, so an
    # editable install of the checkout cannot stand in for the wheel.
    libraries = os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    code = (
        "import rooftrace, rooftrace.hardware, rooftrace.tracer, rooftrace.costmodels,"
        " rooftrace.reporting\n"
        "import importlib.util\n"
        f"assert not any(map(importlib.util.find_spec, {sorted(LINKS)}))\n"
        "print(rooftrace.__file__)"
    )
    where = run(scripts / "python", "-c", code, cwd=tmp_path, PYTHONPATH=libraries)
    assert Path(where.strip()).is_relative_to(fresh)
    assert "report" in run(scripts / "rooftrace", "--help", cwd=tmp_path, PYTHONPATH=libraries)
