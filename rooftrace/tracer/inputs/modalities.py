"""Inputs that are not token ids (images, sounds, series), by the names of a model's parameters.

Sizes are read off the config.  A name can mean more than one layout, so there is a list for each,
and the caller takes the first that the model accepts.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer.inputs.calls import MOST_DRAWN, as_before, learn, sized
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.values import (
    META,
    REAL_VALUE,
    Values,
    own_tensors,
    parameters_of,
    tensors_in,
    twin,
)

MAX_TRIALS = 48
_SIDE = 24
"""Rows and columns of a grid of patches: many numbers divide it."""
_ROWS = 16
"""Length of a sequence that somebody else embedded."""
_REGIONS = 36
"""Regions that a detector finds in an image."""
SECONDS = 10
"""Length of a sound."""

Layouts = Sequence[Mapping[str, Tensor]]
"""Ways to fill in one parameter, each with the further parameters that go with it."""


class Sizes:
    """Sizes from a config and the configs inside it; the first config that has a field wins."""

    def __init__(self, config: Any, batch: int, length: int = 0) -> None:
        self.configs = list(_configs(config))
        self.batch, self.length = batch, length  # of a prompt

    def find(self, *fields: str) -> Any:
        """The first value of these fields; None if no config has one."""
        for field, part in itertools.product(fields, self.configs):
            value = getattr(part, field, None)
            if value is not None and not callable(value):
                return value
        return None

    def number(self, *fields: str, default: int) -> int:
        value = self.find(*fields)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        return int(value) if isinstance(value, (int, float)) and value > 0 else default

    def pair(self, *fields: str, default: int) -> tuple[int, int]:
        value = self.find(*fields)
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            return value[0], value[-1]
        return (value, value) if isinstance(value, int) and value > 0 else (default, default)


def _configs(config: Any) -> Iterator[Any]:
    """A config, the configs inside it, those inside them."""
    level = [config]
    while level:
        yield from level
        level = [
            inner
            for part in level
            for inner in vars(part).values()
            if hasattr(inner, "model_type") and hasattr(inner, "__dict__")
        ]


def _floats(*shape: int) -> Tensor:
    return sized(shape, torch.float32)


def _rows(row: Sequence[int], batch: int) -> Tensor:
    """One row of integers as often as the batch has samples."""
    return integers(torch.tensor(row).expand(batch, len(row)))


def _ones(*shape: int) -> Tensor:
    return integers(torch.ones((), dtype=torch.int64).expand(shape))


def integers(value: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers with values; of very many only the sizes."""
    unknown = sized(tuple(value.shape), dtype)
    return unknown if value.numel() > MOST_DRAWN else twin(value.to(dtype).contiguous())


# -- layouts by parameter --------------------------------------------------------------------------


def _images(sizes: Sizes, name: str) -> Layouts:
    """One image, a video, a pair, an image of another size, or rows of patches."""
    channels = sizes.number("num_channels", "in_channels", "in_chans", default=3)
    side = sizes.pair("image_size", "img_size", default=224)
    frames = sizes.number("num_frames", "frames_per_clip", default=8)
    batch = sizes.batch
    image = (batch, channels, *side)
    video = (batch, frames, channels, *side)
    first = (video, image) if name == "pixel_values_videos" else (image, video)
    shapes = (
        *first,
        (batch, 2, channels, *side),
        (batch, 1, channels, *side),
        *((batch, channels, other, other) for other in (256, 336, 512, 1024, 1536)),
    )
    return [*({name: _floats(*shape)} for shape in shapes), *_patches(sizes, name)]


def _patches(sizes: Sizes, name: str) -> Layouts:
    """Patches as rows, with the grid or the shape that they come from."""
    channels = sizes.number("num_channels", "in_channels", "in_chans", default=3)
    patch = sizes.number("patch_size", default=16)
    depths = dict.fromkeys((sizes.number("temporal_patch_size", default=1), 2, 1))
    side = _SIDE
    width = channels * patch * patch
    flats = [_floats(side * side * sizes.batch, depth * width) for depth in depths]
    grid = _rows((1, side, side), sizes.batch)
    rows = _floats(sizes.batch, side * side, width)
    shape = _rows((side, side), sizes.batch)
    mask = _ones(sizes.batch, side * side)
    places = integers(torch.cartesian_prod(torch.arange(side), torch.arange(side)))
    return [
        *({name: flat, "grid_thw": grid} for flat in flats),
        {name: rows, "spatial_shapes": shape, "pixel_attention_mask": mask},
        {name: rows, "pixel_position_ids": twin(places.__dict__[REAL_VALUE][None])},
    ]


def _waves(sizes: Sizes, name: str) -> Layouts:
    """A sound as samples, with one channel, or as a spectrogram with its bands last."""
    samples = SECONDS * sizes.number("sampling_rate", "sample_rate", default=16000)
    bands = sizes.number("num_mel_bins", default=80)
    frames = sizes.number("max_length", default=1024)
    batch = sizes.batch
    samples -= samples % 1920  # full frames, for most
    return [
        {name: _floats(*shape)}
        for shape in ((batch, samples), (batch, 1, samples), (batch, frames, bands))
    ]


def _features(sizes: Sizes, name: str) -> Layouts:
    """A spectrogram, with its frames last or its bands."""
    bands = sizes.number(
        "num_mel_bins",
        "feature_size",
        "input_feat_per_channel",
        "n_mels",
        "input_dim",
        "input_size",
        default=80,
    )
    frames = 2 * sizes.number("max_source_positions", default=1500)
    batch = sizes.batch
    bins = tuple(dict.fromkeys((bands, 80, 128, 160, 320)))
    shapes = [(batch, n, frames) for n in bins] + [(batch, 1504, n) for n in bins]
    return [
        {
            name: _floats(*shape),
            "input_features_mask": _ones(batch, max(shape[1:])),
        }
        for shape in shapes
    ]


def _past(sizes: Sizes, name: str) -> Layouts:
    """A series: its values, and whether and when they were observed."""
    lags = sizes.find("lags_sequence") or [0]
    length = sizes.number("context_length", default=64) + max(lags)
    channels = sizes.number("num_input_channels", "input_size", default=1)
    times = sizes.find("num_time_features")
    times = times if isinstance(times, int) else 1
    batch = sizes.batch
    shapes = [(batch, length, channels), (batch, length)]
    if channels == 1:  # most have no dimension of one channel
        shapes.reverse()
    return [
        {
            name: _floats(*shape),
            "past_observed_mask": _floats(*shape),
            "past_time_features": _floats(batch, length, times),
        }
        for shape in shapes
    ]


def _regions(sizes: Sizes, name: str) -> Layouts:
    """Regions of a detector: features and places."""
    width = sizes.number("visual_feat_dim", default=2048)
    places = sizes.number("visual_pos_dim", default=4)
    return [
        {
            "visual_feats": _floats(sizes.batch, _REGIONS, width),
            "visual_pos": _floats(sizes.batch, _REGIONS, places),
        }
    ]


def _rendered(sizes: Sizes, name: str) -> Layouts:
    """Patches as rows, each behind its row and column."""
    channels = sizes.number("num_channels", default=3)
    patch = sizes.number("patch_size", default=16)
    return [{name: _floats(sizes.batch, _SIDE * _SIDE, 2 + channels * patch * patch)}]


def _embedded_regions(sizes: Sizes, name: str) -> Layouts:
    """Regions of a detector: embeddings, next to those of the text."""
    width = sizes.number("visual_embedding_dim", default=512)
    regions = _floats(sizes.batch, _REGIONS, width)
    both = sizes.length + _REGIONS
    return [
        {
            name: regions,
            "visual_attention_mask": _ones(sizes.batch, _REGIONS),
            "attention_mask": _ones(sizes.batch, sizes.length),
            "region_to_phrase_position": _rows([0] * both, sizes.batch),
        }
    ]


def _boxes(sizes: Sizes, name: str) -> Layouts:
    """Where on a page each token of a text stands."""
    places = torch.tensor([0, 0, 100, 100]).expand(sizes.batch, sizes.length, 4)
    boxes, mask = {name: integers(places)}, _ones(sizes.batch, sizes.length)
    first = integers(mask.__dict__[REAL_VALUE], torch.bool)
    return [boxes, {**boxes, "attention_mask": mask, "bbox_first_token_mask": first}]


def _entities(sizes: Sizes, name: str) -> Layouts:
    """Entities that a text names, and where: two, which a pair has, or one."""
    longest = sizes.number("max_mention_length", default=30)
    return [
        {
            name: _ones(sizes.batch, count),
            "entity_attention_mask": _ones(sizes.batch, count),
            "entity_position_ids": _ones(sizes.batch, count, longest),
            "entity_start_positions": _ones(sizes.batch, count),
            "entity_end_positions": _ones(sizes.batch, count),
        }
        for count in (2, 1)
    ]


_LAYOUTS: Mapping[str, Callable[[Sizes, str], Layouts]] = {
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "hidden_states": _patches,
    "input_values": _waves,
    "input_features": _features,
    "past_values": _past,
    "visual_feats": _regions,
    "visual_embeds": _embedded_regions,
    "bbox": _boxes,
    "entity_ids": _entities,
    "flattened_patches": _rendered,
}
TOKENS = ("input_ids", "decoder_input_ids")


# -- choosing --------------------------------------------------------------------------------------


def _is_embedded(name: str) -> bool:
    """Whether a parameter takes embeddings, which another part of the model computes."""
    return name.endswith("_embeds")


def layouts(sizes: Sizes, name: str) -> Layouts:
    if name in _LAYOUTS:
        return _LAYOUTS[name](sizes, name)
    width = sizes.number("hidden_size", "d_model", default=768)
    return [{name: _floats(sizes.batch, _ROWS, width)}]


def required(module: nn.Module) -> list[str]:
    """Names of the arguments that a module cannot do without."""
    return [
        name
        for name, p in parameters_of(module).items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def other_than_text(module: nn.Module) -> set[str]:
    """The parameters that take a listed kind of input other than token ids."""
    return set(parameters_of(module)) & set(_LAYOUTS)


def guessed(
    module: nn.Module,
    config: Any,
    main: str,
    tokens: Mapping[str, Tensor],
    passed: Mapping[str, Tensor],
    batch: int,
) -> tuple[dict[str, Tensor] | None, str]:
    """Arguments that the module accepts with the user's, or None and the module's error.

    tokens: ids that could be passed, by name.
    """
    complaint = ""
    tries = _candidates(module, config, main, tokens, passed, batch)
    names: set[str] = set()
    for arguments in itertools.islice(tries, MAX_TRIALS):
        _, error = outcome(module, {**arguments, **passed}, training=False)
        if error is None:
            return arguments, ""
        if set(arguments) > names:  # its error for the likeliest layout of most arguments
            names = set(arguments)
            complaint = " ".join(f"{type(error).__name__}: {error}".split())
    return None, complaint


def _candidates(
    module: nn.Module,
    config: Any,
    main: str,
    tokens: Mapping[str, Tensor],
    passed: Mapping[str, Tensor],
    batch: int,
) -> Iterator[dict[str, Tensor]]:
    """Arguments that the module may accept, the likeliest first.

    First the main argument with the required ones, then with one more, then with all candidates.
    An argument that goes with another is passed only if forward takes it.
    """
    parameters = parameters_of(module)
    length = next((ids.shape[-1] for ids in tokens.values()), 0)
    sizes = Sizes(config, batch, length)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    candidates: dict[str, Layouts] = {name: [{name: ids}] for name, ids in tokens.items()}
    candidates |= {n: layouts(sizes, n) for n in parameters if n in _LAYOUTS or _is_embedded(n)}
    needed = [name for name in required(module) if name not in passed]
    candidates = {name: layouts for name, layouts in candidates.items() if name not in passed}
    wanted = (main, "decoder_input_ids", *needed)
    first = [name for name in dict.fromkeys(wanted) if name in candidates]
    others = [
        name
        for name in candidates
        if name not in first and (name in _LAYOUTS or not _is_embedded(name))
    ]
    for names in (first, *([*first, other] for other in others), [*first, *others]):
        for filled in itertools.product(*(candidates[name] for name in names)):
            tensors = {name: t for part in filled for name, t in part.items() if name in parameters}
            if tensors and all(name in tensors for name in needed):
                yield {
                    name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()
                }


def outcome(
    module: nn.Module, arguments: Mapping[str, Any], training: bool = True, turned: int = 0
) -> tuple[Any, Exception | None]:
    """The result of the module for these arguments, or its error.

    turned: how many source lines with unknown conditions may be tried the other way.
    """
    lines: set[str] = set()
    while True:
        values = Values(turned=lines)
        with _unrecorded(module, arguments, training, values):
            try:
                return module(**arguments), None
            except Exception as error:  # whatever the code of a model may raise
                refused = error
        if len(lines) == turned or values.last_line in {"", *lines}:
            return None, refused
        lines.add(values.last_line)


@contextlib.contextmanager
def _unrecorded(
    module: nn.Module,
    arguments: Mapping[str, Any],
    training: bool = False,
    values: Values | None = None,
) -> Iterator[None]:
    """Inside, the module runs on meta without gradients; values of tensors are followed."""
    recorder = Recorder(values, record=False)
    tensors = (tensor for part in module.modules() for tensor in own_tensors(part))
    for tensor in (*tensors_in(dict(arguments)), *tensors):
        learn(recorder.values, tensor)
    try:
        with as_before(module), torch.no_grad(), recorder, torch.device(META):
            module.train(training)
            yield
    finally:
        recorder.close()


# -- companions of a given input -------------------------------------------------------------------

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


def grids(module: nn.Module, passed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The grid of the patches in `passed`, if forward takes one; all rows are one image."""
    parameters = parameters_of(module)
    return {
        grid: integers(torch.tensor([[1, *_rectangle(passed[name].shape[0])]]))
        for name, grid in _GRIDS.items()
        if name in passed and passed[name].dim() == 2 and grid in parameters and grid not in passed
    }


_LONGEST = 1 << 20
"""Cells of the shorter side of a grid at most."""


def _rectangle(count: int) -> tuple[int, int]:
    """The sides of the most square rectangle of `count` cells; even sides if possible."""
    sides = [n for n in range(1, min(math.isqrt(count), _LONGEST) + 1) if count % n == 0]
    even = [n for n in sides if n % 2 == 0 and count // n % 2 == 0]
    short = max(even or sides)
    return short, count // short


# -- placeholders in a prompt ----------------------------------------------------------------------


def placeholders(
    module: Any, config: Any, passed: Mapping[str, Tensor]
) -> list[tuple[int, int, int]]:
    """The placeholder tokens for images (1), videos (2) and sounds (3), and how many of each.

    The model computes the features of its inputs; it accepts only as many tokens as features.
    Raises RequestError where it makes none.
    """
    kinds = []
    for type_id, kind in enumerate(("image", "video", "audio"), start=1):
        make = getattr(module, f"get_{kind}_features", None)
        token = getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))
        if make is None or token is None:
            continue
        accepts = inspect.signature(make).parameters
        needed = [n for n, p in accepts.items() if p.default is p.empty and p.kind not in (2, 4)]
        if not needed or needed[0] not in passed:
            continue
        try:
            with _unrecorded(module, passed):
                features = make(**{name: t for name, t in passed.items() if name in accepts})
        except Exception as error:  # whatever the code of a model may raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RequestError(
                f"{type(module).__name__}: it makes no {kind} features of the inputs that were "
                f"given ({reason}); its {make.__name__} takes {', '.join(accepts)}"
            ) from error
        features = tensors_in(getattr(features, "pooler_output", features))
        count = sum(t.numel() // t.shape[-1] for t in features if t.dim() > 1)
        kinds.append((type_id, int(token), count))
    return kinds
