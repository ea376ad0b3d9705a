"""From the name of a target on the command line to a module on meta and its inputs.

A target is ``package.module:attr``, ``path/file.py:attr``, the path of a Hugging Face config.json,
``hf:ORG/NAME`` (a locally cached config; no remote code), the name of a config that comes with
rooftrace, an exported program (.pt2, .onnx), or a saved graph (handled by graphfile).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from rooftrace.errors import RequestError, TargetError, hint
from rooftrace.hardware.units import plural
from rooftrace.tracer import Request, names, users_traceback
from rooftrace.tracer.inputs import Inputs, Loaded, call_inputs, module_inputs
from rooftrace.tracer.recording import Recorder, followed, overrides
from rooftrace.tracer.targets import huggingface
from rooftrace.tracer.targets.configs import CHECKPOINTS
from rooftrace.tracer.targets.isolation import from_source, imported, own_imports, place_of, prepare
from rooftrace.tracer.targets.programs import load_program
from rooftrace.tracer.values import META, Values


def load_target(target: str, request: Request | None = None) -> Loaded:
    """Build the module that `target` names, on meta, and inputs of the requested sizes.

    Raises TargetError for a target that does not exist or is no module; RequestError for inputs
    that cannot be guessed.
    """
    request = request or Request()
    with own_imports(leave=True):
        built = _built(target, request)
        if isinstance(built, huggingface.Described):
            return huggingface.from_config(built, request)
        return Loaded(built.module, built.inputs(), built.name)


def load_module(
    target: str, request: Request | None = None, *, real: bool = False
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the module that `target` names without any inputs for it, on meta.

    With it come sentences on gaps of its files, and on their storage.
    real: with its weights, as its code makes them; a config has none.  Raises TargetError for a
    target that does not exist or is no module, and RequestError for weights that there are not.
    """
    request = request or Request()
    if real and (target.startswith("hf:") or names.is_config(target)):
        raise RequestError(
            f"{target}: a config has no weights; name a file of weights, or code that makes them"
        )
    if real and names.is_program(target):
        raise RequestError(f"{target}: the weights of a program are not read")
    with overrides.apart(), own_imports(leave=True):
        built = _built(target, request, real)
        if not isinstance(built, huggingface.Described):
            return built.module, ()
        described = huggingface.built_from(built)
        return described.module, tuple(text for _, text in described.assumptions)


class _TargetModule(NamedTuple):
    """A module that a target is or makes, and how its inputs are made."""

    module: nn.Module
    name: str
    inputs: Callable[[], Inputs]


def _built(
    target: str, request: Request, real: bool = False
) -> huggingface.Described | _TargetModule:
    """The module that a target names, or that a config of transformers describes.

    real: with weights.
    """
    if target.startswith("hf:"):
        return huggingface.config_on_hub(target, request)
    if names.is_program(target):
        program, args, kwargs = load_program(target, request)
        return _TargetModule(program, target, partial(call_inputs, program, args, kwargs))
    config = names.config_file(target)
    if config is None and target.endswith(".json.gz"):
        config = Path(target)
    if config is None:
        return _code_of(target, request, real)
    if config.suffix == ".gguf":
        return huggingface.config_in_gguf(config, request)
    data = huggingface.fields_in(config)
    if data.get("model_type"):
        return huggingface.config_in(config, data, request)
    module, inputs = other_model(data, str(config))
    made = partial(module_inputs, module, request, inputs, target)
    return _TargetModule(module, config.resolve().parent.name, made)


def _code_of(target: str, request: Request, real: bool) -> _TargetModule:
    """The module of a target that is code."""
    if ":" in target:
        where, _, attribute = target.rpartition(":")
        source = (import_file if where.endswith(".py") else import_module)(where, target)
        function = _attribute(source, attribute, target)
        settings = _settings(function, target, request)
        module, inputs = _module_and_inputs(function, target, settings, real)
        shared = request.mesh and "mesh" not in settings
        said = (("plan", _share(module, target)),) if shared else ()

        def made() -> Inputs:
            guessed = module_inputs(module, request, inputs, target, attribute)
            return replace(guessed, assumptions=(*guessed.assumptions, *said))

        return _TargetModule(module, attribute if where.endswith(".py") else target, made)
    raise names.unnamed(target)


def _settings(function: Any, target: str, request: Request) -> Mapping[str, Any]:
    """Keyword arguments for a function that builds a module; over a mesh, that is one of them.

    Raises RequestError for a mesh that nothing takes.
    """
    if request.checkpoint != "none":
        raise RequestError(
            f"--checkpoint {request.checkpoint}: {target} is code, which checkpoints its module "
            "itself"
        )
    if request.zero != names.ZERO[-1]:
        raise RequestError(
            f"--zero {request.zero}: {target} is code, which shards its module itself"
        )
    if not request.mesh:
        return request.settings
    from rooftrace.tracer.sharding import fsdp

    takes = inspect.signature(function).parameters if callable(function) else {}
    is_module = isinstance(function, nn.Module)
    if not is_module and "mesh" not in takes and request.mesh.keys() == {"dp"}:
        return request.settings
    if is_module or "mesh" not in takes:
        raise RequestError(
            f"--mesh {fsdp.shown(request.mesh)}: {target} takes no `mesh`; name a function "
            "build(mesh) that shards the module which it returns"
        )
    return {**request.settings, "mesh": fsdp.devices()}


def _share(module: nn.Module, target: str) -> str:
    """Let replicas share a module that its code does not shard; a sentence on it."""
    from torch.distributed.fsdp import fully_shard

    from rooftrace.tracer.sharding import fsdp

    items = [name for name, _ in module.named_modules() if name.rpartition(".")[2].isdigit()]
    outermost = [n for n in items if not any(part.isdigit() for part in n.split(".")[:-1])]
    try:
        for name in (*outermost, ""):
            fully_shard(module.get_submodule(name), mesh=fsdp.devices())
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise failed(f"sharing the weights ({name or 'the root'})", target, error) from error
    parts = f"{plural(len(outermost), 'item')} of lists of modules, and the rest" * bool(outermost)
    return f"its code shards nothing: fully_shard (FSDP2) on {parts or 'the whole'}"


def _attribute(source: ModuleType, attribute: str, target: str) -> Any:
    value: Any = source
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [
                n
                for n, value in vars(source).items()
                if not n.startswith("_") and not isinstance(value, ModuleType)
            ]
            raise TargetError(
                f"target {target!r}: there is no {attribute!r}; "
                f"there are {', '.join(names[:12]) or 'no names at all'}"
            )
        value = getattr(value, part)
    return value


def _module_and_inputs(
    made: Any, target: str, settings: Mapping[str, Any], real: bool
) -> tuple[nn.Module, Any]:
    """The module and inputs of a target: itself, or the result of a function or class."""
    inputs: Any = None
    if isinstance(made, nn.Module) and settings:
        raise RequestError(
            f"{next(iter(settings))}=: target {target!r} is a module that is built already; name "
            "a function or a class, which takes keyword arguments"
        )
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise TargetError(
                f"target {target!r}: expected a torch.nn.Module or a function that "
                f"returns one, got {type(made).__name__}"
            )
        made = built(made, target, real, settings)
        match made:
            case (nn.Module() as module, given):
                made, inputs = module, given
            case (nn.Module() as module, [*args], dict(kwargs)):
                made, inputs = module, partial(module, *args, **kwargs)
    if not isinstance(made, nn.Module):
        raise TargetError(
            f"target {target!r}: expected a torch.nn.Module, (module, inputs) or (module, args, "
            f"kwargs), got {_kind(made)}"
        )
    return made, inputs


def _kind(made: Any) -> str:
    """The type of what a function returned, and of its items."""
    if not isinstance(made, tuple):
        return type(made).__name__
    return f"({', '.join(type(item).__name__ for item in made)})"


def built(
    function: Callable[..., Any], target: str, real: bool, settings: Mapping[str, Any]
) -> Any:
    """Call a user's factory on meta.  real: where it stands, with weights.

    settings: keyword arguments for it.  Raises RequestError for those that it does not take.
    Small tensors have values meanwhile, so that `linspace(...).item()` works in a constructor.
    """
    keywords = dict(settings)
    _check_keywords(function, keywords, target)
    required = [name for name in _required(function) if name not in keywords]
    if required == ["mesh"]:
        raise TargetError(
            f"target {target!r}: it takes a mesh; name its axes, for example --mesh dp=4,tp=8"
        )
    if required:
        raise TargetError(
            f"target {target!r}: expected a function without required arguments; "
            f"it requires {', '.join(required)}"
        )
    try:
        return function(**keywords) if real else _on_meta(partial(function, **keywords))
    except (Exception, SystemExit) as error:  # whatever a user's function may raise
        raise failed("building the module", target, error) from error


def _check_keywords(function: Callable[..., Any], keywords: Mapping[str, Any], target: str) -> None:
    """Raise RequestError for a keyword argument that a function does not take."""
    if not keywords:
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name, value in keywords.items():
        if name not in parameters:
            raise RequestError(
                f"{name}={value!r:.40}: {target} takes {', '.join(parameters) or 'no arguments'}"
                f"{hint(name, tuple(parameters))}"
            )


def _on_meta(function: Callable[..., Any]) -> Any:
    recorder = Recorder(Values(draws=True), record=False)
    try:
        with torch.device(META), recorder:
            return function()
    finally:
        recorder.values.close(keep=True)


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


# -- otherconfigs ----------------------------------------------------------------------------------
# JSON files of models that are no configs of transformers: their kinds, and ways out.
#
# timm and diffusers build a module from theirs where they are installed; each other kind gets one
# error that names the kind of the file.


_PLAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def other_model(data: Mapping[str, Any], target: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """The module of a file that is not transformers', on meta, and arguments for a batch of one.

    None for arguments that its library does not know.  Raises TargetError for any other file.
    """
    where = f"target {target!r}"
    if isinstance(data.get("architecture"), str):
        return _of_timm(data, where)
    if isinstance(data.get("_class_name"), str):
        return _of_diffusers(data, where), None
    raise TargetError(f"{where}: {_what(data)}")


def _what(data: Mapping[str, Any]) -> str:
    """The kind of a file that no library builds a module from, and a target to name instead."""
    if "traceEvents" in data or str(data.get("schema")).startswith("rooftrace.run/"):
        return (
            "a file of measurements, which names no model: `rooftrace diff FILE` says where its "
            "time goes, `rooftrace validate FILE --target TARGET` sets it beside a prediction"
        )
    if "weight_map" in data:
        return (
            "the index of a sharded checkpoint, which names tensors and no model: name its "
            "config.json; `rooftrace inventory` reads the shards"
        )
    if "peft_type" in data:
        base = data.get("base_model_name_or_path")
        return (
            f"a PEFT adapter ({data['peft_type']!s:.20}, r={data.get('r')!r:.20}) of {base!r:.80}: "
            "name the config.json of that model, or code that returns get_peft_model(...) as "
            "file.py:attr"
        )
    if "dim" in data and ("n_layers" in data or "n_heads" in data):
        return (
            "the params.json of Mistral's or Meta's own code: name the config.json of the same "
            "model, which its repository has for transformers"
        )
    of_modelopt = "quant_algo" in str(data.get("quantization", ""))
    packed = "weight_bits" in data or "w_bit" in data or ("bits" in data and "group_size" in data)
    if of_modelopt or packed or "config_groups" in data:
        return "a declaration of quantisation: name the config.json beside it, which reads it"
    return "a Hugging Face config has a model_type; this one has none"


def _of_timm(data: Mapping[str, Any], where: str) -> tuple[nn.Module, tuple[Any, ...]]:
    name, arguments = data["architecture"], data.get("model_args") or {}
    if not _PLAIN.fullmatch(name):
        raise TargetError(f"{where}: architecture {name!r:.60}: expected the name of a timm model")
    if not isinstance(arguments, Mapping) or set(arguments) & set(CHECKPOINTS):
        raise TargetError(f"{where}: model_args {arguments!r:.60}: expected sizes, no checkpoint")
    timm = _library("timm", f"a timm config of {name!r}", where)
    more = {"num_classes": data["num_classes"]} if isinstance(data.get("num_classes"), int) else {}
    try:
        with torch.device(META):
            module: nn.Module = timm.create_model(name, pretrained=False, **{**more, **arguments})
    except Exception as error:  # whatever its code may raise
        raise _refused("timm", error, where) from error
    settings = getattr(module, "pretrained_cfg", None) or data.get("pretrained_cfg") or {}
    size = settings.get("input_size") or (3, 224, 224)
    return module, (torch.zeros(1, *size, device=META),)


def _of_diffusers(data: Mapping[str, Any], where: str) -> nn.Module:
    name = data["_class_name"]
    parts = [k for k, v in data.items() if isinstance(v, list) and len(v) == 2 and v[0]]
    if name.endswith("Pipeline") and parts:
        raise TargetError(
            f"{where}: a pipeline of diffusers ({', '.join(sorted(parts)[:6])}): name the "
            "config.json of one part, in the folder of its name"
        )
    diffusers = _library("diffusers", f"a config of diffusers' {name}", where)
    kind = getattr(diffusers, name, None) if _PLAIN.fullmatch(name) else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TargetError(f"{where}: {name!r:.60} is no model of diffusers {diffusers.__version__}")
    try:
        with torch.device(META):
            module: nn.Module = kind.from_config(dict(data))  # type: ignore[attr-defined]
    except Exception as error:  # whatever its code may raise
        raise _refused("diffusers", error, where) from error
    return module


def _library(name: str, kind: str, where: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise TargetError(
            f"{where}: {kind}: pip install {name} to build it, or name code that returns the "
            "module as file.py:attr"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        raise _refused(f"importing {name}: it", error, where) from error


def _refused(library: str, error: Exception, where: str) -> TargetError:
    return TargetError(f"{where}: {library} fails: {' '.join(str(error).split()):.300}")


# -- Imports the code of a target: a file with its neighbours and its package, or a module ---------


def import_file(where: str, target: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no file {where!r}")
    # Its neighbours are imported as when it is run, and as when it is run through a link.
    folders = list(dict.fromkeys([str(path.resolve().parent), os.path.abspath(path.parent)]))
    package = _package_of(path)
    if package is not None:
        root, name = package
        folders = list(dict.fromkeys([str(root), *folders]))
    else:
        name = f"_rooftrace_target_{path.stem}"
    folders = list(dict.fromkeys([*folders, *_roots(path.resolve())]))
    kept = prepare(f"{path.resolve()}", folders)
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
        raise failed(f"importing {where!r}", target, error) from error
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
    return _above_package(path.resolve(), max(levels))


def _above_package(path: Path, levels: int = 0) -> tuple[Path, str]:
    """The folder above the outermost package that a file is in, and the file's dotted name there.

    levels: how many of the folders above it are packages, also without an `__init__.py`.
    """
    folder, names = path.parent, [path.stem]
    while folder.name and (len(names) <= levels or (folder / "__init__.py").is_file()):
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


def _roots(path: Path) -> list[str]:
    """Folders of a file's checkout with packages that the file, or one next to it, imports.

    These folders come first, because the same package may be installed from another checkout.  They
    are the folder above the file's package and, up to the root of the project, each folder or its
    `src` that has a module of an imported name.
    """
    tops = _imported_names(path.parent) - {"rooftrace", "torch"} - sys.stdlib_module_names
    above = list(path.parents)
    ends = [i for i, folder in enumerate(above) if any((folder / m).exists() for m in _MARKS)]
    above_package, _ = _above_package(path)
    roots = [above_package] if above_package != path.parent else []
    for i, folder in enumerate(above):
        if folder.name in tops:
            roots.append(folder.parent)
        if ends and i <= ends[0]:
            roots += [p for p in (folder, folder / "src") if any(_has(p, top) for top in tops)]
    return [str(root) for root in roots]


_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""Names of files and folders that mark the root of a project."""


def _has(folder: Path, top: str) -> bool:
    """Whether a folder has a module or a package of this name, with or without `__init__.py`."""
    return (folder / f"{top}.py").is_file() or any((folder / top).glob("*.py"))


def _imported_names(folder: Path) -> set[str]:
    """The top-level names that Python files of a folder import absolutely."""
    names: set[str] = set()
    for file in sorted(filter(Path.is_file, folder.glob("*.py")))[:_FILES]:
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
"""The most files of a folder whose imports are read."""


def import_module(where: str, target: str) -> ModuleType:
    here = os.path.realpath(os.getcwd())
    top = where.partition(".")[0]
    if here in sys.path:
        sys.path.remove(here)
    sys.path.insert(0, here)
    origin = place_of(top) if top not in sys.stdlib_module_names else None
    kept = prepare(f"{where} in {origin or here}", [here], [origin] if origin else [])
    if kept is not None:
        return kept
    try:
        with followed():
            module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise TargetError(f"target {target!r}: there is no module {error.name!r}") from None
        raise failed(f"importing {where!r}", target, error) from error
    except (Exception, SystemExit) as error:  # whatever a user's module may raise
        raise failed(f"importing {where!r}", target, error) from error
    imported(module)
    return module


def failed(doing: str, target: str, error: BaseException) -> TargetError:
    """A TargetError for a failure of the user's code, with the traceback shortened to that code."""
    reason = str(error) or "no message"
    lines = [
        f"target {target!r}: {doing} failed: {type(error).__name__}: {reason}",
        users_traceback(error),
    ]
    return TargetError("\n".join(line for line in lines if line))
