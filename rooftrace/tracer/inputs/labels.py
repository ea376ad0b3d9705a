"""Labels of a training call, by the parameters of a head's forward, its config and its output.

A head says by the names of its parameters which labels its loss takes, and by the scores that it
returns of which sizes.  A name can mean more than one layout, so there is a list for each, the
likeliest first; the first is taken with which the head returns a loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer.inputs.calls import drawn, sized
from rooftrace.tracer.inputs.modalities import (
    MAX_TRIALS,
    Sizes,
    integers,
    layouts,
    other_than_text,
    outcome,
)
from rooftrace.tracer.values import REAL_VALUE, parameters_of

OBJECTS = 7
"""Objects in an image, as many as an image of COCO has on average (860,001 in 118,287)."""
FRAMES_PER_TOKEN = 4
"""Frames of a sound for a token of its transcript: letters of English speech come every 70 ms."""

TURNED = 6
"""How many lines with unknown conditions are tried the other way for one guess."""

Labels = tuple[dict[str, Any], tuple[tuple[str, str], ...]]
"""Arguments of a call, and the assumption on their sizes: kind and text."""
_Guesses = list[tuple[Any, str]]
"""Values of one argument, the likeliest first, each with the assumption on its sizes."""


@dataclass(frozen=True)
class _Head:
    """A head, the inputs of its call, and the shapes of the numbers that it returns for them."""

    sizes: Sizes
    dtype: torch.dtype
    inputs: Mapping[str, Any]
    outputs: Mapping[str, tuple[int, ...]]

    @property
    def batch(self) -> int:
        return self.sizes.batch

    @property
    def prompt(self) -> Tensor | None:
        """The token ids that the head writes, or reads."""
        prompt: Tensor | None = self.inputs.get("decoder_input_ids", self.inputs.get("input_ids"))
        return prompt

    @property
    def scores(self) -> list[tuple[int, ...]]:
        """Shapes of the outputs with a batch; those that are called scores first."""
        names = sorted(self.outputs, key=lambda name: "logits" not in name)
        return [self.outputs[name] for name in names if self.outputs[name][:1] == (self.batch,)]

    @property
    def image(self) -> tuple[int, int]:
        """Rows and columns of an image."""
        pixels = self.inputs.get("pixel_values")
        if isinstance(pixels, Tensor) and pixels.dim() > 3:
            return int(pixels.shape[-2]), int(pixels.shape[-1])
        return self.sizes.pair("image_size", "img_size", default=224)

    def floats(self, *shape: int) -> Tensor:
        return sized(shape, self.dtype)

    def classes(self, *shape: int, below: int, first: int = 0) -> Tensor:
        """Whole numbers that are drawn uniformly, with a fixed seed."""
        return drawn(shape, torch.int64, min(first, below - 1), below)


# -- labels for scores -----------------------------------------------------------------------------


def _labels(head: _Head, name: str) -> _Guesses:
    if "pred_boxes" in head.outputs:
        return _objects(head, name)
    guesses: _Guesses = []
    for shape in head.scores:
        if len(shape) in _BY_RANK:
            guesses += _BY_RANK[len(shape)](head, shape)
        guesses.append((head.floats(*shape), ""))
    return guesses if head.prompt is None else [*guesses, (head.prompt, "")]


def _of_samples(head: _Head, shape: tuple[int, ...]) -> _Guesses:
    """Labels for scores [batch, classes]: one class, several at once, or numbers."""
    batch, count = shape
    labels = max(head.sizes.number("num_labels", default=count), 2)
    classes = (head.classes(batch, below=min(count, labels)), "")
    numbers = (head.floats(*((batch,) if count == 1 else shape)), "")
    problem = head.sizes.find("problem_type")
    single = problem == "single_label_classification" or (problem is None and count > 1)
    return [classes, numbers] if single else [numbers, classes]


def _of_places(head: _Head, shape: tuple[int, ...]) -> _Guesses:
    """Labels for scores [batch, places, classes]: a transcript, or a class for each place."""
    batch, places, count = shape
    guesses: _Guesses = []
    prompt = head.prompt
    if prompt is None:
        length = max(1, places // FRAMES_PER_TOKEN)
        text = f"a transcript of {length} tokens, one for {FRAMES_PER_TOKEN} of {places} frames"
        guesses.append((head.classes(batch, length, below=count, first=1), text))
    elif prompt.shape == (batch, places) and count > head.sizes.number("num_labels", default=0):
        guesses.append((prompt, ""))
    each = head.classes(batch, places, below=count)
    guesses += [(each, ""), (_one_hot(each, count), ""), (head.classes(batch, below=count), "")]
    books = head.sizes.find("num_codebooks")
    if isinstance(books, int):
        guesses.append((head.classes(batch, places, books, below=count), ""))
    if "bool_masked_pos" in head.inputs:
        masked = int(head.inputs["bool_masked_pos"].__dict__[REAL_VALUE].sum())
        guesses.insert(0, (head.classes(masked, below=count), ""))
    return guesses


def _of_pixels(head: _Head, shape: tuple[int, ...]) -> _Guesses:
    """Labels for scores [batch, classes, rows, columns]: a class for each pixel of the image."""
    batch, count, *side = shape
    return [(head.classes(batch, *s, below=count), "") for s in (head.image, side)]


_BY_RANK: Mapping[int, Callable[[_Head, tuple[int, ...]], _Guesses]] = {
    2: _of_samples,
    3: _of_places,
    4: _of_pixels,
}


def _one_hot(classes: Tensor, count: int) -> Tensor:
    made = sized((*classes.shape, count), torch.int64)
    value = classes.__dict__.get(REAL_VALUE)
    if value is not None:
        made.__dict__[REAL_VALUE] = torch.nn.functional.one_hot(value, count)
    return made


# -- labels of other kinds -------------------------------------------------------------------------


def _objects(head: _Head, name: str) -> _Guesses:
    """The objects of each image: a class, a box and a mask each."""
    count = head.sizes.number("num_labels", default=2)
    objects = [
        {
            "class_labels": head.classes(OBJECTS, below=count),
            "boxes": head.floats(OBJECTS, 4),
            **({"masks": _masks(head)} if "pred_masks" in head.outputs else {}),
        }
        for _ in range(head.batch)
    ]
    return [(objects, f"{OBJECTS} objects in each image, as COCO has on average")]


def _masks(head: _Head) -> Tensor:
    return head.floats(OBJECTS, *head.image)


def _object_masks(head: _Head, name: str) -> _Guesses:
    text = f"{OBJECTS} objects in each image, as COCO has on average"
    return [([_masks(head) for _ in range(head.batch)], text)]


def _object_classes(head: _Head, name: str) -> _Guesses:
    count = head.sizes.number("num_labels", default=2)
    return [([head.classes(OBJECTS, below=count) for _ in range(head.batch)], "")]


def _places_in_text(head: _Head, name: str) -> _Guesses:
    """Where in each prompt an answer begins, or ends."""
    prompt = head.prompt
    length = 1 if prompt is None else int(prompt.shape[-1])
    return [(head.classes(*shape, below=length), "") for shape in ((head.batch,), (head.batch, 1))]


def _questions(head: _Head, name: str) -> _Guesses:
    """Where in each prompt a question stands: in its first token."""
    return [(integers(torch.zeros(head.batch, 1)), "")]


def _classes_in_text(head: _Head, name: str) -> _Guesses:
    shape = () if head.prompt is None else head.prompt.shape
    return [(head.classes(*shape, below=head.sizes.number("num_labels", default=2)), "")]


def _places_of_text(head: _Head, name: str) -> _Guesses:
    """For each token of a prompt another one."""
    shape = () if head.prompt is None else head.prompt.shape
    return [(head.classes(*shape, below=shape[-1] if shape else 1), "")]


def _yes_or_no(head: _Head, name: str) -> _Guesses:
    return [(head.classes(head.batch, below=2), "")]


def _masked_patches(head: _Head, name: str) -> _Guesses:
    """Which patches of an image are to be restored: every second one."""
    patch = head.sizes.pair("patch_size", default=16)
    rows, columns = (side // n for side, n in zip(head.image, patch, strict=True))
    row = torch.arange(max(1, rows * columns)) % 2 == 1
    text = f"every second of {row.numel()} patches is masked"
    return [(integers(row.expand(head.batch, -1), torch.bool), text)]


def _masked_frames(head: _Head, name: str) -> _Guesses:
    """Which frames of a sound are masked: every second one."""
    frames = next((shape[1] for shape in head.scores if len(shape) == 3), 1)
    row = torch.arange(frames) % 2 == 1
    return [
        (integers(row.expand(head.batch, -1), torch.bool), f"every second of {frames} is masked")
    ]


def _other_frames(head: _Head, name: str) -> _Guesses:
    """For each frame its negatives."""
    frames = next((shape[1] for shape in head.scores if len(shape) == 3), 1)
    count = head.sizes.number("num_negatives", default=100)
    return [(head.classes(head.batch, frames, count, below=head.batch * frames), "")]


def _series(head: _Head, name: str) -> _Guesses:
    """The values that follow a series, which the head predicts."""
    past = head.inputs.get("past_values")
    length = head.sizes.number("prediction_length", "horizon_length", default=1)
    shapes = [shape for shape in head.scores if len(shape) > 1]
    if isinstance(past, Tensor):
        shapes.insert(0, (head.batch, length, *past.shape[2:]))
    return [(head.floats(*shape), "") for shape in shapes]


def _times(head: _Head, name: str) -> _Guesses:
    past = head.inputs.get("past_time_features")
    length = head.sizes.number("prediction_length", default=1)
    return [(head.floats(head.batch, length, past.shape[-1]), "")] if past is not None else []


def _targets(head: _Head, name: str) -> _Guesses:
    """A class for each sample where scores are returned, else numbers."""
    guesses: _Guesses = []
    for output, shape in head.outputs.items():
        if shape[:1] == (head.batch,) and len(shape) > 1:
            classes = (head.classes(head.batch, below=shape[-1]), "")
            numbers = (head.floats(*shape), "")
            guesses += [classes, numbers] if "logits" in output else [numbers, classes]
    return guesses


_MADE: Mapping[str, Callable[[_Head, str], _Guesses]] = {
    "bool_masked_pos": _masked_patches,
    "labels": _labels,
    "start_positions": _places_in_text,
    "end_positions": _places_in_text,
    "next_sentence_label": _yes_or_no,
    "sentence_order_label": _yes_or_no,
    "sentence_image_labels": _yes_or_no,
    "mask_labels": _object_masks,
    "class_labels": _object_classes,
    "mask_time_indices": _masked_frames,
    "sampled_negative_indices": _other_frames,
    "future_values": _series,
    "future_time_features": _times,
    "target_values": _targets,
    "return_loss": lambda head, name: [(True, "")],
    "question_positions": _questions,
    "initial_token_labels": _classes_in_text,
    "subsequent_token_labels": _places_of_text,
}
"""Parameters that a loss takes."""
_MASKED = "bool_masked_pos"
_OF_TOKENS = {"attention_mask": 1, "mm_token_type_ids": 0}
"""Inputs [batch, sequence] by which a head reads all of its input, as text."""


# -- choosing --------------------------------------------------------------------------------------


def takes_labels(module: nn.Module) -> set[str]:
    """The parameters of forward that only a loss takes."""
    return set(parameters_of(module)) & set(_MADE)


def labels_of(module: Any, inputs: Mapping[str, Any], batch: int) -> Labels:
    """Labels with which a head returns a loss, in addition to the inputs of its call.

    Where its loss asks for more inputs, they are among them.  None of a head that has no loss of
    its own.  Raises RequestError where the inputs are refused, or every guess.
    """
    kind, parameters = type(module).__name__, parameters_of(module)
    plain = {**inputs, **({"use_cache": False} if "use_cache" in parameters else {})}
    names = [name for name in _MADE if name in takes_labels(module) and name not in inputs]
    output, refused = outcome(module, plain, turned=TURNED)
    lossless, complaint = "", ""
    guesses = _candidates(module, plain, output, names, batch)
    for arguments, notes in itertools.islice(guesses, MAX_TRIALS):
        output, error = outcome(module, {**plain, **arguments}, turned=TURNED)
        if error is None and isinstance(_named(output).get("loss"), Tensor):
            return arguments, tuple(("inputs", note) for note in notes)
        if isinstance(error, ImportError):
            raise RequestError(f"training of {kind}: its loss says {_said(error)}") from error
        if error is None and arguments.keys() >= {*names}:
            lossless = lossless or "it returns none"
        elif error is not None and not complaint:
            complaint = f"to {_described(arguments)} it says {_said(error)}"
            if _refuses_all(module, plain, arguments, error):
                lossless = f"it says {_said(error)}"
                break
    if refused is not None:
        raise RequestError(
            f"training of {kind}: it refuses {_described(inputs)}: {_said(refused)}; set what it "
            "misses in its config, or pass it with --input NAME=SHAPE:DTYPE: its forward takes "
            f"{', '.join(parameters)}"
        ) from refused
    if lossless or not names:
        text = f"{kind} has no loss for {', '.join(names)}: {lossless}"
        return {}, (("loss", text),) if names else ()
    raise RequestError(
        f"training of {kind}: its {', '.join(names)} cannot be guessed ({complaint}); pass "
        f"--input {names[0]}=SHAPE:DTYPE, for example --input {names[0]}={batch}:int64, or what "
        f"else its forward takes ({', '.join(parameters)})"
    )


def _refuses_all(
    module: nn.Module, plain: Mapping[str, Any], labels: Mapping[str, Any], error: Exception
) -> bool:
    """Whether a head that takes its other inputs says this on purpose to any labels."""
    if not isinstance(error, (NotImplementedError, ValueError)):
        return False
    nonsense = {**plain, **dict.fromkeys(labels, "no labels")}
    return _said(outcome(module, nonsense, turned=TURNED)[1]) == _said(error)


def _candidates(
    module: Any, plain: Mapping[str, Any], output: Any, names: Sequence[str], batch: int
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Labels that a head may take, and the assumption on each: all of `names`, then one alone.

    First they go with the inputs as they are, then with a mask, then with each other input.
    output: the result of the head for its inputs.
    """
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    prompt = plain.get("input_ids")
    sizes = Sizes(module.config, batch, 0 if prompt is None else prompt.shape[-1])
    for more in ({}, *_companions(module, plain, sizes)) if names else ():
        if more:
            output, error = outcome(module, {**plain, **more}, turned=TURNED)
            if error is not None:
                continue
        head = _Head(sizes, dtype, {**plain, **more}, _shapes(output))
        more_notes = [f"{name}: given because its loss asks for it" for name in more]
        if _MASKED in names:
            ((masked, note),) = _MADE[_MASKED](head, _MASKED)
            head = replace(head, inputs={**head.inputs, _MASKED: masked})
            more, more_notes = {**more, _MASKED: masked}, [*more_notes, f"{_MASKED}: {note}"]
        guesses = {name: _MADE[name](head, name) for name in names if name != _MASKED}
        guesses = {name: values for name, values in guesses.items() if values}
        for some in _subsets(tuple(guesses)):
            for values in itertools.product(*(guesses[name] for name in some)):
                labels = {name: value for name, (value, _) in zip(some, values, strict=True)}
                notes = [f"{n}: {note}" for n, (_, note) in zip(some, values, strict=True) if note]
                yield {**more, **labels}, [*more_notes, *notes]


def _subsets(names: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """All of the names, all but one, and each alone."""
    but_one = (tuple(n for n in names if n != left) for left in names)
    return dict.fromkeys((names, *but_one, *((name,) for name in names)))


def _companions(
    module: nn.Module, plain: Mapping[str, Any], sizes: Sizes
) -> Iterator[dict[str, Tensor]]:
    """Inputs that a loss may need besides those of forward."""
    parameters = parameters_of(module)
    tokens = plain.get("input_ids", next(iter(plain.values())))
    for name, value in _OF_TOKENS.items():
        if name in parameters and name not in plain:
            yield {name: integers(torch.tensor(value).expand(tokens.shape[:2]))}
    for name in sorted(other_than_text(module)):
        for layout in layouts(sizes, name):
            more = {n: t for n, t in layout.items() if n in parameters and n not in plain}
            if more:
                yield more


def _named(output: Any) -> Mapping[str, Any]:
    return output if isinstance(output, Mapping) else {"output": output}


def _shapes(output: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the numbers among the outputs."""
    return {
        name: tuple(value.shape)
        for name, value in _named(output).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _said(error: Exception | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _described(arguments: Mapping[str, Any]) -> str:
    """The arguments in a few words: "labels [2, 16]"."""
    return ", ".join(
        f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name
        for name, value in arguments.items()
    )
