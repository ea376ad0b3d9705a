"""Command lines as programs, run in a process of their own at one rank, and the caller after."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rooftrace.errors import RequestError
from rooftrace.scripts.launch import Ended, Ranks, understood
from rooftrace.scripts.launch.records import CommandLine
from tests.tracer.launched_here import ended_of, stopped_at

pytestmark = pytest.mark.quick

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file below the test's folder and returns its path."""

    def written(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return written


def run(*words: str, world: int | None = None, rank: int = 0, **options: object) -> Ended:
    return ended_of(words, options.pop("folder", None), world, rank, **options)


# -- command lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "launcher", "processes", "nodes", "arguments"),
    [
        ("t.py a.yaml --lr=1", "", None, None, ("a.yaml", "--lr=1")),
        ("python -u t.py -m x", "", None, None, ("-m", "x")),
        ("python3.11 -W ignore t.py", "", None, None, ()),
        ("torchrun --nproc_per_node=8 t.py c.py", "torchrun", 8, None, ("c.py",)),
        ("torchrun --nproc-per-node gpu t.py", "torchrun", None, None, ()),
        ("torchrun --standalone --nnodes 2 --nproc_per_node 4 t.py", "torchrun", 4, 2, ()),
        ("python -m torch.distributed.run --nproc_per_node=2 t.py", "torchrun", 2, None, ()),
        ("deepspeed --num_gpus=8 t.py --deepspeed", "deepspeed", 8, None, ("--deepspeed",)),
        ("deepspeed --include localhost:0,1@b:0,1 t.py", "deepspeed", 2, 2, ()),
        ("accelerate launch --num_processes 8 t.py --x", "accelerate", 8, 1, ("--x",)),
        ("accelerate launch --num_processes 8 --num_machines 2 --machine_rank 0 "
         "--main_process_ip h --main_process_port 1 t.py", "accelerate", 4, 2, ()),
        ("fabric run --devices 4 t.py", "fabric run", 4, 1, ()),
        ("lightning run model --devices=0,1 t.py", "fabric run", 2, 1, ()),
        ("env A=1 uv run t.py", "", None, None, ()),
    ],
)  # fmt: skip
def test_a_command_line_is_understood(
    words: str,
    launcher: str,
    processes: int | None,
    nodes: int | None,
    arguments: tuple[str, ...],
    write: Write,
    tmp_path: Path,
) -> None:
    script = write("t.py", "")
    launch = understood(words.split(), tmp_path)
    assert (launch.program, launch.written, launch.module) == (script, "t.py", False)
    assert (launch.launcher, launch.processes, launch.nodes) == (launcher, processes, nodes)
    assert launch.arguments == arguments


def test_modules_are_programs_too() -> None:
    launch = understood(["python", "-m", "a.b", "--x"])
    assert (launch.program, launch.module, launch.arguments) == ("a.b", True, ("--x",))
    launch = understood(["torchrun", "--nproc_per_node=2", "-m", "a.b", "--x"])
    assert (launch.program, launch.module, launch.arguments) == ("a.b", True, ("--x",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian.py", "trian.py: no such script .* did you mean 'train.py'?"),
        ("", "without a program"),
        ("python", "expected a script, or -m"),
        ("python -c pass", "write code of -c"),
        ("--steps 3", "--steps: expected a program before"),
        ("mpirun -np 8 train.py", "mpirun: a launcher that is not understood.*--ranks"),
        ("torchrun --nproc_per_nod 8 --bogus train.py", "unrecognized arguments: --bogus"),
        ("torchrun --nproc_per_node=many train.py", "nproc-per-node=many: expected a whole number"),
        ("deepspeed --gpus 8 train.py", "unrecognized arguments|required: user_args|--gpus"),
        ("accelerate launch --mixed_precision int3 train.py", "int3"),
        ("accelerate launch --multi_gpu --num_processes 1 train.py", "at least 2 processes"),
        ("python -m a-b", "-m a-b: expected the dotted name"),
        ("folder", "folder: a folder without __main__.py"),
    ],
)
def test_a_command_line_that_makes_no_sense_says_why(
    words: str, said: str, write: Write, tmp_path: Path
) -> None:
    write("train.py", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match=said):
        understood(words.split(), tmp_path)


def test_accelerate_itself_says_which_variables_it_sets(write: Write, tmp_path: Path) -> None:
    write("t.py", "")
    write(
        "a.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_transformer_layer_cls_to_wrap: Block\n",
    )
    before = dict(os.environ)
    launch = understood(
        ["accelerate", "launch", "--config_file", str(tmp_path / "a.yaml"), "t.py"], tmp_path
    )
    assert dict(os.environ) == before
    assert launch.processes == 4
    assert launch.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launch.environment["ACCELERATE_USE_FSDP"] == "true"
    assert launch.environment["FSDP_VERSION"] == "2"
    assert launch.environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"


def test_ranks_agree_with_the_launcher() -> None:
    launch = CommandLine(program="t.py", launcher="torchrun", processes=8, nodes=2)
    assert Ranks.of(launch, rank=11) == Ranks(11, 16, 3, 8)
    assert Ranks.of(launch, 16).nodes == 2
    with pytest.raises(RequestError, match="--ranks 8: torchrun starts 8 processes on 2 nodes"):
        Ranks.of(launch, 8)
    with pytest.raises(RequestError, match="rank 16 of 16: expected a rank from 0 to 15"):
        Ranks.of(launch, rank=16)
    script = CommandLine(program="t.py")
    assert Ranks.of(script) == Ranks(0, 1, 0, 1)
    assert Ranks.of(script, 16, 9, per_node=8) == Ranks(9, 16, 1, 8)
    with pytest.raises(RequestError, match="12 ranks on nodes of 8"):
        Ranks.of(script, 12, per_node=8)


def test_a_group_of_one_is_a_group_where_somebody_says_so(write: Write) -> None:
    script = write(
        "t.py",
        "import os, sys, torch.distributed as d; d.init_process_group('nccl'); "
        "sys.exit(d.get_world_size() + int(os.environ['WORLD_SIZE']))",
    )
    assert run(script, world=1).code == 2
    failed = run(script)
    assert "nothing says of how many processes" in str(failed)


# -- running ---------------------------------------------------------------------------------------


def test_a_script_sees_what_it_would_see_in_a_process_of_its_own(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("neighbour.py", "value = 7\n")
    script = write(
        "s/train.py",
        "import argparse, os, pickle, sys\n"
        "import beside\n"
        "class Thing: pass\n"
        "parser = argparse.ArgumentParser(); parser.add_argument('--lr', type=float)\n"
        "assert parser.parse_args().lr == 0.5\n"
        "assert __name__ == '__main__' and __file__ == os.path.abspath('s/train.py')\n"
        "assert sys.argv == ['s/train.py', '--lr', '0.5']\n"
        "assert sys.path[0] == os.path.dirname(os.path.realpath(__file__))\n"
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "assert sys.modules['__main__'].Thing is Thing and __package__ is None\n"
        "print('lr', beside.value)\n",
    )
    write("s/beside.py", "value = 3\n")
    main, before = sys.modules["__main__"], list(sys.path)
    ended = run("python", "s/train.py", "--lr", "0.5", folder=tmp_path)
    assert (ended.reason, ended.exception) == ("end", None)
    assert capsys.readouterr().out == "lr 3\n"
    assert sys.modules["__main__"] is main and sys.path == before
    assert "beside" not in sys.modules
    assert script


def test_a_configurator_changes_the_globals_of_the_script(write: Write, tmp_path: Path) -> None:
    write(
        "configurator.py",
        "import sys\n"
        "for word in sys.argv[1:]:\n"
        "    key, value = word[2:].split('=')\n"
        "    globals()[key] = type(globals()[key])(value)\n",
    )
    write(
        "train.py",
        "batch_size = 12\n"
        "keys = [k for k, v in globals().items() if not k.startswith('_') and type(v) is int]\n"
        "exec(open('configurator.py').read())\n"
        "raise SystemExit({k: globals()[k] for k in keys}['batch_size'])\n",
    )
    assert run("train.py", "--batch_size=4", folder=tmp_path).code == 4


def test_a_package_runs_with_its_own_imports(write: Write, tmp_path: Path) -> None:
    write("pack/__init__.py", "")
    write("pack/part.py", "code = 5\n")
    write("pack/__main__.py", "import sys\nfrom .part import code\nsys.exit(code)\n")
    write("pack/train.py", "from . import part\nassert __spec__.name == 'pack.train'\n")
    assert run("python", "-m", "pack", folder=tmp_path).code == 5
    ended = run("-m", "pack.train", folder=tmp_path)
    assert (ended.reason, ended.exception) == ("end", None)
    assert "pack" not in sys.modules
    with pytest.raises(RequestError, match=r"-m pack\.nothing: no module pack\.nothing"):
        run("-m", "pack.nothing", folder=tmp_path)


def test_a_folder_with_main_runs(write: Write, tmp_path: Path) -> None:
    write("app/__main__.py", "import sys, helper\nsys.exit(helper.code)\n")
    write("app/helper.py", "code = 6\n")
    assert run("app", folder=tmp_path).code == 6


@pytest.mark.parametrize(
    ("text", "reason", "code"),
    [
        ("", "end", 0),
        ("import sys; sys.exit(3)", "exit", 3),
        ("import sys; sys.exit()", "exit", 0),
        ("import sys; sys.exit('no data')", "exit", 1),
        ("import os; os._exit(4)", "exit", 4),
        ("1 / 0", "error", 0),
    ],
)
def test_how_a_program_ended_is_said(text: str, reason: str, code: int, write: Write) -> None:
    ended = run(write("t.py", text))
    assert (ended.reason, ended.code) == (reason, code)
    assert isinstance(ended.exception, ZeroDivisionError) == (reason == "error")


def test_a_file_that_is_no_program_is_refused(write: Write) -> None:
    with pytest.raises(RequestError, match=r"t\.py: no program of Python"):
        run(write("t.py", "def"))


def test_exit_handlers_run_once_the_last_first(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import atexit, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "@atexit.register\n"
        "def first(): print('first')\n"
        "atexit.register(print, 'second')\n"
        "gone = atexit.register(lambda: print('gone')); atexit.unregister(gone)\n"
        "atexit.register(lambda: 1 / 0)\n"
        "print('body')\n"
    )
    assert run(write("t.py", text)).reason == "end"
    out, err = capsys.readouterr()
    assert out == "body\nthread\nsecond\nfirst\n"
    assert "ZeroDivisionError" in err


THREADS = {
    "thread": "threading.Thread(target=work, name='w').start()\n",
    "task": "futures.ThreadPoolExecutor(1, 'w').submit(work)\n",
    "asked": "futures.ThreadPoolExecutor(1, 'w').submit(work).exception()\n",
    "exit": "threading.Thread(target=work, name='w').start()\nraise SystemExit(7)\n",
}


@pytest.mark.parametrize("how", THREADS)
def test_an_error_that_ends_a_thread_ends_the_script_as_one(how: str, write: Write) -> None:
    text = "import threading\nfrom concurrent import futures\ndef work(): 1 / 0\n"
    ended = run(write("t.py", text + THREADS[how]))
    if how == "asked":
        assert (ended.reason, ended.exception) == ("end", None)
    elif how == "exit":
        assert (ended.reason, ended.code) == ("exit", 7)
    else:
        assert ended.reason == "error" and isinstance(ended.exception, ZeroDivisionError)
        assert ended.thread.startswith("w")


def test_a_script_waits_for_the_threads_that_it_left(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()\n"
    )
    assert run(write("t.py", text)).reason == "end"
    assert capsys.readouterr().out == "late\n"


# -- ending it -------------------------------------------------------------------------------------

SWALLOWS = {
    "nothing": "while going(): step()\n",
    "exceptions": "while going():\n    try: step()\n    except Exception: pass\n",
    "everything": "while going():\n    try: step()\n    except: tries.append(1)\n",
}


@pytest.mark.parametrize("how", SWALLOWS)
def test_a_program_is_stopped_whatever_it_catches(
    how: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(
        "t.py",
        "import atexit, rooftrace_hook\n"
        "atexit.register(print, 'exit')\n"
        "step, going, tries = rooftrace_hook.step, rooftrace_hook.going, []\n"
        "try:\n"
        "    if True:\n"
        + "".join(f"        {line}\n" for line in SWALLOWS[how].splitlines())
        + "finally: print('finally')\n",
    )
    ended, steps = stopped_at([script], 3)
    everything = how == "everything"
    assert (ended.reason, steps) == ("stopped", 3 + 3 * everything)
    assert capsys.readouterr().out == ("exit\n" if everything else "finally\nexit\n")


def test_a_program_is_stopped_in_a_thread_of_it(write: Write) -> None:
    text = (
        "import rooftrace_hook, threading, time\n"
        "def work():\n"
        "    while rooftrace_hook.going(): rooftrace_hook.step()\n"
        "threading.Thread(target=work).start()\n"
        "while True: time.sleep(60)\n"
    )
    ended, steps = stopped_at([write("t.py", text)], 3)
    assert (ended.reason, steps) == ("stopped", 3)


@pytest.mark.parametrize("end", ["sys.exit(3)", "1 / 0", "pass"])
def test_a_process_that_a_program_forks_ends_as_itself(
    end: str, write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import os, sys, time\n"
        "child = os.fork()\n"
        f"if not child: {end}\n"
        "else:\n"
        "    print('ended', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    sys.exit(5)\n"
    )
    ended = run(write("t.py", text))
    out, err = capfd.readouterr()
    assert (ended.code, ended.exception) == (5, None)
    assert out == f"ended {dict(zip(('s', '1', 'p'), (3, 1, 0), strict=True))[end[0]]}\n"
    assert ("ZeroDivisionError" in err) == (end == "1 / 0")


def test_programs_run_beside_each_other(write: Write) -> None:
    text = (
        "import os, sys, time\n"
        "open(sys.argv[1], 'w').close()\n"
        "end = time.monotonic() + 30\n"
        "while not os.path.exists(sys.argv[2]) and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(time.monotonic() > end)\n"
    )
    script, folder = write("t.py", text), os.path.dirname(write("a/x", ""))
    first, second = f"{folder}/1", f"{folder}/2"
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, script, *w) for w in ((first, second), (second, first))]
        assert [each.result().code for each in runs] == [0, 0]


# -- the process after it --------------------------------------------------------------------------

CHANGES = """
import builtins, gc, locale, logging, os, random, signal, socket, sys, threading, warnings
import numpy, torch, torch.distributed
import torch.nn.modules.module as hooks
os.environ["MADE_HERE"] = "1"; os.environ.pop("HOME", None)
os.chdir(os.path.dirname(__file__)); os.umask(0o027)
sys.argv.append("x"); sys.path.append("/nowhere"); sys.setrecursionlimit(5000)
sys.excepthook = sys.displayhook = sys.unraisablehook = print
sys.stdout = open(os.devnull, "w"); sys.stderr = sys.stdout
threading.excepthook = print
signal.signal(signal.SIGTERM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 1000)
warnings.filterwarnings("error"); warnings.showwarning = print
logging.getLogger().setLevel(1); logging.getLogger().addHandler(logging.StreamHandler())
logging.getLogger("torch").setLevel(1); logging.disable(50)
builtins.print = len; builtins.made_here = 1
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
numpy.seterr(all="raise"); numpy.set_printoptions(precision=2)
torch.set_default_dtype(torch.float64); torch.set_default_device("meta")
torch.set_grad_enabled(False); torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("high")
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cudnn.benchmark = True
torch.backends.cuda.enable_flash_sdp(False)
torch.set_autocast_enabled("cuda", True); torch.set_autocast_dtype("cuda", torch.bfloat16)
torch.set_num_threads(torch.get_num_threads() + 1); torch.set_anomaly_enabled(True)
torch.set_printoptions(precision=2); torch.set_warn_always(True)
hooks.register_module_forward_hook(print)
torch.multiprocessing.set_start_method("spawn", force=True)
gc.disable(); gc.set_threshold(7); socket.setdefaulttimeout(3)
sys.settrace(lambda *_: None)
torch.distributed.init_process_group("gloo", rank=0, world_size=2)
"""


def state() -> dict[str, object]:
    """What `CHANGES` changes, read in other words than the code that keeps it."""
    import builtins
    import gc
    import logging
    import multiprocessing
    import random
    import signal
    import socket
    import warnings

    import numpy as np
    import torch
    import torch.nn.modules.module as hooks

    mask = os.umask(0)
    os.umask(mask)
    cuda = torch.backends.cuda
    return {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": mask,
        "sys": (list(sys.argv), list(sys.path), list(sys.meta_path), sys.getrecursionlimit()),
        "hooks": (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook),
        "streams": (sys.stdout, sys.stderr, sys.gettrace()),
        "signals": (signal.getsignal(signal.SIGTERM), signal.getitimer(signal.ITIMER_REAL)),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "logger": logging.getLogger("torch").level,
        "builtins": (builtins.print, hasattr(builtins, "made_here"), builtins.open, os.open),
        "random": (random.getstate(), np.random.get_state()[1].tolist()),
        "torch random": torch.get_rng_state().tolist(),
        "numpy": (np.geterr(), np.get_printoptions()),
        "dtype": (torch.get_default_dtype(), torch.empty(()).device, torch.is_grad_enabled()),
        "deterministic": torch.get_deterministic_debug_mode(),
        "products": torch.get_float32_matmul_precision(),
        "bf16": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn": (torch.backends.cudnn.benchmark, cuda.flash_sdp_enabled()),
        "autocast": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "threads": (torch.get_num_threads(), torch.is_anomaly_enabled()),
        "printed": (repr(torch.tensor(1 / 3)), torch.is_warn_always_enabled()),
        "global hooks": len(hooks._global_forward_hooks),
        "start": multiprocessing.get_start_method(allow_none=True),
        "collector": (gc.isenabled(), gc.get_threshold(), socket.getdefaulttimeout()),
        "group": torch.distributed.is_initialized(),
        "init": torch.distributed.init_process_group,
        "spawn": torch.multiprocessing.spawn,
        "main": sys.modules["__main__"],
    }


def test_the_process_is_afterwards_as_before(write: Write) -> None:
    script = write("s/t.py", CHANGES)
    before = state()
    ended = run(script, world=2)
    after = state()
    assert ended.exception is None
    assert {name for name in before if before[name] != after[name]} == set()


def test_nothing_is_downloaded_unless_the_user_says_so(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    text = "import os; print(os.environ['WANDB_MODE'], os.environ['HF_HUB_OFFLINE'])"
    ended = run(write("t.py", text))
    assert capsys.readouterr().out == "offline 1\n"
    assert any("HF_HUB_OFFLINE=1" in said for _, said in ended.assumed)


# -- a scratch folder ------------------------------------------------------------------------------

WRITES = """
import glob, json, logging, os, shutil, tempfile
from pathlib import Path
import numpy, torch
os.makedirs("out/a", exist_ok=True)
torch.save({"step": 3}, "out/a/last.pt")
assert torch.load("out/a/last.pt") == {"step": 3}
os.replace("out/a/last.pt", "out/a/best.pt")
assert glob.glob("out/**/*.pt", recursive=True) == ["out/a/best.pt"]
with open("data.txt", "a") as file: file.write("more")
assert Path("data.txt").read_text() == "data more"
os.remove("old.txt")
assert not os.path.exists("old.txt") and sorted(os.listdir()) == ["data.txt", "folder", "out"]
os.rename("folder", "moved")
assert os.listdir("moved") == ["inside.txt"] and not os.path.isdir("folder")
shutil.rmtree("moved")
assert sorted(path.name for path in Path(".").iterdir()) == ["data.txt", "out"]
numpy.save("array.npy", numpy.arange(3))
assert numpy.load("array.npy").tolist() == [0, 1, 2]
from safetensors.torch import load_file, save_file
save_file({"w": torch.ones(2)}, "w.safetensors")
assert load_file("w.safetensors")["w"].tolist() == [1, 1]
logging.basicConfig(filename="train.log", force=True)
logging.warning("said")
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "x").write_text("x")
    assert os.listdir(folder) == ["x"]
try: open("nowhere/x", "w")
except FileNotFoundError as error: assert error.filename == "nowhere/x"
else: raise AssertionError
try: os.mkdir("out")
except FileExistsError: pass
else: raise AssertionError
"""


def test_files_of_the_program_come_to_lie_in_the_scratch_folder(
    write: Write, tmp_path: Path
) -> None:
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    script = write("t.py", WRITES)
    write("work/data.txt", "data ")
    write("work/old.txt", "old")
    write("work/folder/inside.txt", "inside")
    ended = run(script, folder=work, scratch=scratch)
    assert ended.exception is None
    there = {str(p.relative_to(work)): p.read_text() for p in work.rglob("*") if p.is_file()}
    assert there == {"data.txt": "data ", "old.txt": "old", "folder/inside.txt": "inside"}
    twin = scratch / str(work).lstrip("/")
    assert (twin / "data.txt").read_text() == "data more"
    files = {str(path.relative_to(twin)) for path in twin.rglob("*") if path.is_file()}
    assert files == {"data.txt", "array.npy", "out/a/best.pt", "train.log", "w.safetensors"}


def test_without_a_scratch_folder_files_are_written_where_the_program_says(
    write: Write, tmp_path: Path
) -> None:
    run(write("t.py", "open('made.txt', 'w').write('x')"), folder=tmp_path)
    assert (tmp_path / "made.txt").read_text() == "x"


def test_a_scratch_folder_that_cannot_be_made_is_refused(write: Write) -> None:
    script = write("t.py", "")
    with pytest.raises(RequestError, match="scratch folder"):
        run(script, scratch=Path(script, "below"))
