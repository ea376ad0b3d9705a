"""Which models the installed packages have, how each is built on meta, and what it is called with.

Sizes of inputs are read off configs and signatures by the names of parameters; where that fails the
entry counts as "inputs", not as a failure of the tracer.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.inputs.calls import Inputs, call_inputs
from rooftrace.tracer.inputs.huggingface import model_inputs
from rooftrace.tracer.inputs.modalities import Sizes, required
from rooftrace.tracer.request import Request
from rooftrace.tracer.targets import huggingface
from rooftrace.tracer.targets.target import built, load_target
from rooftrace.tracer.values.masks import REAL_VALUE
from rooftrace.tracer.values.trees import tensors_in

BATCH, LENGTH = 1, 64
HEAD_BATCH, HEAD_LENGTH, HEAD_DEPTH = 2, 16, 2
_FIELDS = {
    "head_dim": 64,
    "prediction_length": 24,
    "context_length": 48,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "mask_token_id": 4,
    "use_mask_token": True,
}
"""Values of fields that the default configs of some heads leave out."""
_HEAD = re.compile(r"For[A-Z]")  # and no Former
_DEPTHS = re.compile(
    r"(num|n|encoder|decoder)_?(hidden|encoder|decoder)?_?layers?|depth|num_blocks"
)
_VIDEO = re.compile(r"r3d|mc3|r2plus1d|s3d|swin3d|mvit")
_DETECTION = re.compile(r"rcnn|retinanet|fcos|ssd")
_DIFFUSERS = re.compile(r"^(UNet|Autoencoder|ControlNet|VQModel|Prior)|Transformer\w*Model$|DiT")


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


# -- names -----------------------------------------------------------------------------------------


def names(group: str) -> Iterator[str]:
    """The entries of a group, "GROUP/MODEL"; none, and a word, where it cannot be imported."""
    try:
        found = sorted(_LISTS[group]())
    except Exception as error:  # not installed, or not for this torch
        print(f"{group}: left out: {type(error).__name__}: {error}", file=sys.stderr)
        return
    yield from (f"{group}/{name}" for name in found)


def _hf_names() -> list[str]:
    from transformers import CONFIG_MAPPING

    return list(CONFIG_MAPPING)


def _head_names() -> list[str]:
    """Every class of transformers that has a head, by its name: "For" what it is."""
    import transformers

    named = (name for name in dir(transformers) if _HEAD.search(name))
    kinds = {name: getattr(transformers, name, None) for name in named}
    return [
        name
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    ]


def _timm_names() -> list[str]:
    """The first model of each architecture file: there are over a thousand in all."""
    import timm

    return [timm.list_models(module=module)[0] for module in timm.list_modules()]


def _torchvision_names() -> list[str]:
    from torchvision.models import list_models

    return [name for name in list_models() if not name.startswith("quantized")]


def _diffusers_names() -> list[str]:
    from diffusers import models

    return [name for name in dir(models) if _DIFFUSERS.search(name)]


_ZOO = "zoo.py"
_LISTS: dict[str, Callable[[], list[str]]] = {
    "hf": _hf_names,
    "timm": _timm_names,
    "torchvision": _torchvision_names,
    "diffusers": _diffusers_names,
    "heads": _head_names,
}
GROUPS = tuple(_LISTS)
MODELS = ("hf", "timm", "torchvision", "diffusers")
"""The groups that are traced where none is named: `heads` are more classes of the first."""


def of_folder(folder: Path) -> Iterator[str]:
    """`path/file.py:build...` for every such function of the Python files of a folder.

    A folder may be a zoo of its own instead: `zoo.py` with `build(name)`, which returns a module
    and the calls to try, as (args, kwargs) where kwargs may be a function that makes them, and
    `dev.txt` with the names.  Meta tensors among them may carry what they stand for in `_value`.
    """
    if (folder / _ZOO).exists() and (folder / "dev.txt").exists():
        names = (folder / "dev.txt").read_text(encoding="utf-8").split()
        yield from (f"{folder / _ZOO}:{name}" for name in names)
        return
    for path in sorted(folder.rglob("*.py")):
        for name in re.findall(r"^def (build\w*)\(", path.read_text(encoding="utf-8"), re.M):
            yield f"{path}:{name}"


# -- building --------------------------------------------------------------------------------------


@dataclass
class Entry:
    """A module on meta, and what it may be called with: the first inputs that it accepts count."""

    module: nn.Module
    inputs: Iterable[Inputs]
    phases: tuple[str, ...] = ("forward", "decode", "training")


def load(name: str, depth: int | None = None) -> Entry:
    """The module of an entry, and inputs for it.  Raises RequestError where nothing fits."""
    group, _, model = name.partition("/")
    file, found, entry = name.partition(f"{_ZOO}:")
    if found:
        return _of_zoo(Path(file), entry)
    if group not in _LOADERS or ":" in name:
        loaded = load_target(name)
        return Entry(loaded.module, [loaded.inputs])
    return _LOADERS[group](model, depth)


def _of_zoo(folder: Path, name: str) -> Entry:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module, calls = importlib.import_module(Path(_ZOO).stem).build(name)
    # One by one: what makes the arguments of a later call may change the module.
    return Entry(
        module, (given(args, kwargs() if callable(kwargs) else kwargs) for args, kwargs in calls)
    )


def given(args: Any, kwargs: Any) -> Inputs:
    """A call, with what its meta tensors say that they stand for."""
    for tensor in tensors_in((args, kwargs)):
        if "_value" in tensor.__dict__:
            tensor.__dict__[REAL_VALUE] = tensor.__dict__["_value"].clone()
    return Inputs(args=tuple(args), kwargs=dict(kwargs))


def _hf(name: str, depth: int | None) -> Entry:
    from transformers import CONFIG_MAPPING

    return _of_config(CONFIG_MAPPING[name](), name, depth, BATCH, LENGTH)


def _head(name: str, depth: int | None) -> Entry:
    """A training step of one head, by the default config of its class with few layers.

    A config whose parts do not go together with few layers is taken as it is.
    """
    import transformers

    kind = getattr(transformers, name)
    for layers in (depth or HEAD_DEPTH, None):
        config = kind.config_class()
        config.architectures = [name]
        complete(config)
        try:
            entry = _of_config(config, name, layers, HEAD_BATCH, HEAD_LENGTH)
            break
        except (RequestError, TargetError, ValueError):
            if layers is None:
                raise
    return replace(entry, phases=("training",))


def complete(config: Any) -> None:
    """Give a default config the fields that it needs and leaves to a file, also in those inside.

    Backbones of timm, which may not be installed, are replaced by a ResNet.
    """
    from transformers import ResNetConfig

    fields = vars(config)
    heads = {"num_key_value_heads": fields.get("num_attention_heads")}
    for name, value in {**_FIELDS, **heads}.items():
        if name in fields and not fields[name]:
            setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if getattr(value, "model_type", "") == "timm_backbone":
            setattr(config, name, ResNetConfig(out_features=["stage2", "stage3", "stage4"]))
        elif hasattr(value, "model_type"):
            complete(value)


def _of_config(config: Any, name: str, depth: int | None, batch: int, length: int) -> Entry:
    if depth is not None:
        shallow(config, depth)
    dtype = getattr(config, "dtype", None) or torch.float32
    module = huggingface.module_of(config, dtype, name)
    try:
        inputs = model_inputs(module, Request(batch, length))
    except RequestError:  # it has no such length, or another
        inputs = model_inputs(module, Request(batch))
    return Entry(module, [inputs])


def shallow(config: Any, depth: int) -> None:
    """At most `depth` layers, also in the configs inside, and as many entries in lists of them."""
    fields = dict(vars(config))
    counts = {n for f, n in fields.items() if isinstance(n, int) and _DEPTHS.fullmatch(f)}
    kinds = fields.get("layer_types") or []  # one layer of each kind is left at least
    depth = max([depth, *(kinds.index(kind) + 1 for kind in kinds)])
    for name, value in fields.items():
        if isinstance(value, int) and _DEPTHS.fullmatch(name):
            setattr(config, name, min(value, depth))
        elif name == "depths" and isinstance(value, list):
            config.depths = [min(n, depth) for n in value]
        elif isinstance(value, list) and (len(value) in counts - {1} or name == "layer_types"):
            setattr(config, name, value[:depth])
        elif hasattr(value, "model_type"):
            shallow(value, depth)


def _timm(name: str, depth: int | None) -> Entry:
    import timm

    module = built(lambda: timm.create_model(name), name)
    size = module.default_cfg.get("input_size", (3, 224, 224))
    return _called(module, floats(BATCH, *size))


def _torchvision(name: str, depth: int | None) -> Entry:
    from torchvision.models import get_model, get_model_builder

    backbone = "weights_backbone" in inspect.signature(get_model_builder(name)).parameters
    weights = {"weights": None, **({"weights_backbone": None} if backbone else {})}
    module = built(lambda: get_model(name, **weights), name)
    if _VIDEO.search(name):
        side = 224 if name.startswith(("mvit", "swin3d")) else 112
        return _called(module, floats(BATCH, 3, 16, side, side))
    if _DETECTION.search(name):
        inputs = call_inputs(module, ([floats(3, 320, 320)],), {})
        return Entry(module, [replace(inputs, labels={"targets": [_found(2, 320)]})])
    side = {"inception_v3": 299, "raft_large": 256, "raft_small": 256}.get(name, 224)
    image = floats(2, 3, side, side)
    return _called(module, *([image, image] if name.startswith("raft") else [image]))


def _found(count: int, side: int) -> dict[str, Tensor]:
    """What there is to find in an image: boxes, classes, masks and keypoints of some objects."""
    return {
        "boxes": torch.tensor([[8.0, 8.0, 64.0, 64.0]]).repeat(count, 1),
        "labels": torch.ones(count, dtype=torch.long),
        "masks": torch.zeros(count, side, side, dtype=torch.uint8),
        "keypoints": torch.ones(count, 17, 3),
    }


def _diffusers(name: str, depth: int | None) -> Entry:
    from diffusers import models

    module = built(getattr(models, name), name)
    return Entry(module, _by_name(module, module.config))


_LOADERS: dict[str, Callable[[str, int | None], Entry]] = {
    "hf": _hf,
    "timm": _timm,
    "torchvision": _torchvision,
    "diffusers": _diffusers,
    "heads": _head,
}


def _called(module: nn.Module, *args: Any) -> Entry:
    return Entry(module, [call_inputs(module, args, {})])


# -- inputs by the names of parameters -------------------------------------------------------------


def _by_name(module: Any, config: Any) -> list[Inputs]:
    """Every required parameter of forward by what its name says, once for each layout of images."""
    wanted = required(module)
    found: list[Inputs] = []
    for layout in range(_LAYOUTS):
        known = _known_inputs(config, layout)
        missing = [name for name in wanted if name not in known]
        if missing or not wanted:
            what = ", ".join(missing) or "its inputs"
            raise RequestError(f"{type(module).__name__}: nothing is known of {what}")
        found.append(call_inputs(module, (), {name: known[name] for name in wanted}))
    return found


_LAYOUTS = 3


def _known_inputs(config: Any, layout: int) -> dict[str, Any]:
    size = Sizes(config, BATCH).number
    channels = size("in_channels", "num_channels", default=3)
    side = size("sample_size", "image_size", default=64)
    context = size(
        "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim", default=768
    )
    image = (  # plain, video, a sequence of patches
        floats(BATCH, channels, side, side),
        floats(BATCH, channels, 5, 32, 32),
        floats(BATCH, 1024, channels),
    )[layout]
    return {
        "sample": image,
        "x": image,
        "hidden_states": image,
        "timestep": torch.tensor([1] * BATCH),
        "encoder_hidden_states": floats(BATCH, 77, context),
        "controlnet_cond": floats(BATCH, 3, 8 * side, 8 * side),
        "conditioning_scale": 1.0,
    }
