"""From what a user names on the command line to a module on meta and its inputs.

A target is ``package.module:attr``, ``path/file.py:attr``, the path of a Hugging Face config.json,
``hf:ORG/NAME`` (a locally cached config; no remote code), or a saved graph (handled by graphfile).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.asking import Inputs, Loaded, Request, RequestError, TargetError, is_config
from rooftrace.tracer.graph import dtype_name
from rooftrace.tracer.recording import Recorder, followed
from rooftrace.tracer.source import users_traceback
from rooftrace.tracer.targets import huggingface
from rooftrace.tracer.targets.inputs import call_inputs, check_names, parsed_inputs, with_batch
from rooftrace.tracer.targets.isolation import (
    from_source,
    imported,
    own_imports,
    place_of,
    prepare,
)
from rooftrace.tracer.twins import inputs_on_meta
from rooftrace.tracer.values import META, Values


def load_target(target: str, request: Request | None = None) -> Loaded:
    """Build the module that `target` names, on meta, and inputs of the requested sizes.

    Raises TargetError for a target that is not there or is no module; RequestError for inputs that
    cannot be guessed.
    """
    request = request or Request()
    with own_imports(leave=True):
        return _load(target, request)


def _load(target: str, request: Request) -> Loaded:
    if target.startswith("hf:"):
        return huggingface.from_hub(target, request)
    if is_config(target):
        path = Path(target)
        return huggingface.from_file(path / "config.json" if path.is_dir() else path, request)
    if ":" in target:
        return _from_attribute(target, request)
    raise TargetError(
        f"target {target!r}: expected package.module:attr, path/file.py:attr, a Hugging Face "
        "config.json, hf:ORG/NAME or a saved graph (.json.gz)"
    )


def _from_attribute(target: str, request: Request) -> Loaded:
    where, _, attribute = target.rpartition(":")
    source = (_import_file if where.endswith(".py") else _import_module)(where, target)
    module, inputs = _module_and_inputs(_attribute(source, attribute, target), target)
    made = module_inputs(module, request, inputs, target, attribute)
    return Loaded(module, made, attribute if where.endswith(".py") else target)


def module_inputs(
    module: nn.Module,
    request: Request,
    inputs: Any = None,
    target: str = "",
    attribute: str = "",
) -> Inputs:
    """Inputs of a module: those that came with it, those of the request, or what a Hugging Face
    model says it takes, at the sizes of the request.

    Raises RequestError where there are none, or for a size that they have not.
    """
    target = target or type(module).__name__
    args, kwargs = _arguments(inputs)
    given = parsed_inputs(request.inputs)
    check_names(module, given)
    if not args and not kwargs and hasattr(module, "main_input_name"):
        return huggingface.model_inputs(module, request)  # a Hugging Face model says what it takes
    if not args and not kwargs and not given:
        raise RequestError(
            f"{target}: no inputs; let {attribute} return (module, inputs), or pass "
            "--input NAME=SHAPE:DTYPE, for example --input x=8,3,224,224:fp32"
            if attribute
            else f"{target}: no inputs; pass them, or their shapes, for example "
            'inputs={"x": "8,3,224,224:fp32"}'
        )
    return _fixed_inputs(module, args, {**kwargs, **given}, target, request)


def _fixed_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: str, request: Request
) -> Inputs:
    """Inputs that the target's own code, or --input, gave: only their batch can be changed."""
    for flag in ("seq", "kv"):
        if getattr(request, flag) is not None:
            raise RequestError(
                f"--{flag} {getattr(request, flag)}: {target} makes its own inputs; change their "
                "length there, or pass --input NAME=SHAPE:DTYPE"
            )
    if request.batch is not None:
        args, kwargs = with_batch((args, kwargs), request.batch)
    inputs = call_inputs(module, args, kwargs)
    return replace(inputs, workload={**inputs.workload, "inputs": _described(args, kwargs)})


# -- importing and building ------------------------------------------------------------------------


def _import_file(where: str, target: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no file {where!r}")
    # Its neighbours are imported as when it is run, and as when it is run through a link.
    beside = list(dict.fromkeys([str(path.resolve().parent), os.path.abspath(path.parent)]))
    package = _package_of(path)
    if package is not None:
        root, name = package
        beside = list(dict.fromkeys([str(root), *beside]))
    else:
        name = f"_rooftrace_target_{path.stem}"
    beside = list(dict.fromkeys([*beside, *_roots(path.resolve())]))
    kept = prepare(f"{path.resolve()}", beside)
    if kept is not None:
        return kept
    module: ModuleType | None = None
    try:
        with followed():  # `@torch.autocast("cuda")` is decided where it stands
            if package is not None:
                module = importlib.import_module(name)
            else:
                spec = from_source(name, path)
                if spec is None or spec.loader is None:
                    raise TargetError(f"target {target!r}: {where!r} cannot be imported as Python")
                module = importlib.util.module_from_spec(spec)
                sys.modules[name] = module
                spec.loader.exec_module(module)
    except TargetError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise _failed(f"importing {where!r}", target, error) from error
    imported(module)
    return module


def _package_of(path: Path) -> tuple[Path, str] | None:
    """For a file that imports relatively: the folder above its package, and its dotted name."""
    try:
        nodes = ast.walk(ast.parse(path.read_bytes()))
    except (SyntaxError, ValueError):
        return None  # said where it is imported
    levels = [node.level for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    if not levels or not path.stem.isidentifier():
        return None
    folder, names = path.resolve().parent, [path.stem]
    while folder.name and (len(names) <= max(levels) or (folder / "__init__.py").is_file()):
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


def _roots(path: Path) -> list[str]:
    """Folders of a file's own checkout with packages that the file, or one beside it, imports.

    The same package may be installed from another checkout, which must not take its place.  They
    are the folder above the package that the file is in, and, up to the root of the project,
    folders and their `src` that have a module of an imported name.
    """
    tops = _imported_names(path.parent) - {"rooftrace", "torch"} - sys.stdlib_module_names
    above = list(path.parents)
    ends = [i for i, folder in enumerate(above) if any((folder / m).exists() for m in _MARKS)]
    roots = []
    if (package := _packed_in(path)) is not None:
        roots.append(package)
    for i, folder in enumerate(above):
        if folder.name in tops:
            roots.append(folder.parent)
        if ends and i <= ends[0]:
            roots += [p for p in (folder, folder / "src") if any(_has(p, top) for top in tops)]
    return [str(root) for root in roots]


_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""What the root folder of a project has."""


def _packed_in(path: Path) -> Path | None:
    """The folder above the outermost package that a file is in."""
    folder = path.parent
    while folder.name and (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder if folder != path.parent else None


def _has(folder: Path, top: str) -> bool:
    """Whether a folder has a module or a package of this name, also one without `__init__.py`."""
    return (folder / f"{top}.py").is_file() or any((folder / top).glob("*.py"))


def _imported_names(folder: Path) -> set[str]:
    """The top-level names that Python files of a folder import absolutely."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.py"))[:_FILES]:
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (SyntaxError, ValueError, OSError):
            continue  # said where it is imported
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.partition(".")[0])
    return names


_FILES = 200
"""Most files of a folder that are read for what they import."""


def _import_module(where: str, target: str) -> ModuleType:
    here = os.path.realpath(os.getcwd())
    top = where.partition(".")[0]
    if here in sys.path:
        sys.path.remove(here)
    sys.path.insert(0, here)
    place = place_of(top) if top not in sys.stdlib_module_names else None
    kept = prepare(f"{where} in {place or here}", [here], [place] if place else [])
    if kept is not None:
        return kept
    try:
        with followed():
            module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise TargetError(f"target {target!r}: there is no module {error.name!r}") from None
        raise _failed(f"importing {where!r}", target, error) from error
    except (Exception, SystemExit) as error:  # whatever a user's module may raise
        raise _failed(f"importing {where!r}", target, error) from error
    imported(module)
    return module


def _attribute(source: ModuleType, attribute: str, target: str) -> Any:
    found: Any = source
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [
                n
                for n, value in vars(source).items()
                if not n.startswith("_") and not isinstance(value, ModuleType)
            ]
            raise TargetError(
                f"target {target!r}: there is no {attribute!r}; "
                f"there are {', '.join(names[:12]) or 'no names at all'}"
            )
        found = getattr(found, part)
    return found


def _module_and_inputs(made: Any, target: str) -> tuple[nn.Module, Any]:
    """A module as it is; a function or class is called for a module, or (module, inputs)."""
    inputs: Any = None
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise TargetError(
                f"target {target!r}: expected a torch.nn.Module or a function that "
                f"returns one, got {type(made).__name__}"
            )
        made = built(made, target)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            made, inputs = made
    if not isinstance(made, nn.Module):
        raise TargetError(
            f"target {target!r}: expected a torch.nn.Module or (module, inputs), "
            f"got {type(made).__name__}"
        )
    return made, inputs


def built(function: Callable[..., Any], target: str) -> Any:
    """Call a user's factory on meta.

    Small values are followed there, so that `linspace(...).item()` works in a constructor.
    """
    required = _required(function)
    if required:
        raise TargetError(
            f"target {target!r}: expected a function without required arguments; "
            f"it requires {', '.join(required)}"
        )
    recorder = Recorder(Values(draws=True), record=False)
    try:
        with torch.device(META), recorder:
            made = function()
    except (Exception, SystemExit) as error:  # whatever a user's function may raise
        raise _failed("building the module", target, error) from error
    finally:
        recorder.values.close(keep=True)
    return made


def _required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable written in C does not say
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _failed(doing: str, target: str, error: BaseException) -> TargetError:
    """The user's own traceback, shortened to their code."""
    reason = str(error) or "no message"
    lines = [
        f"target {target!r}: {doing} failed: {type(error).__name__}: {reason}",
        users_traceback(error),
    ]
    return TargetError("\n".join(line for line in lines if line))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a target returned beside its module, as the arguments of a call, on meta."""
    inputs = inputs_on_meta(inputs)
    if inputs is None:
        return (), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Each argument in a few characters: "fp32[8, 3, 224, 224]"."""
    named = {**{str(i): item for i, item in enumerate(args)}, **kwargs}
    return {
        name: f"{dtype_name(item.dtype)}[{', '.join(map(str, item.shape))}]"
        if isinstance(item, Tensor)
        else repr(item)[:60]
        for name, item in named.items()
    }


__all__ = ["Loaded", "Request", "RequestError", "TargetError", "load_target"]
