"""Releases of PyTorch with their CUDA kernels, and the ops registered in this process."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass

from rooftrace.errors import RequestError

# -- registered ops --------------------------------------------------------------------------------
# Which ops are registered with torch in this process.  Loads no torch and no library itself.


def registered_ops(library: str) -> frozenset[str]:
    """The names of a library's ops ("mine.lora", "mine.lora.out"), with and without overloads.

    Empty where torch is not loaded, or nothing of the library is.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return frozenset()
    from rooftrace.tracer.torch_private import all_op_names

    names = set()
    for name in all_op_names():
        namespace, _, op = name.partition("::")
        if namespace == library:
            plain, _, overload = op.partition(".")
            names |= {f"{library}.{plain}", f"{library}.{plain}.{overload or 'default'}"}
    return frozenset(names)


# -- releases --------------------------------------------------------------------------------------
# Releases of PyTorch, and which kernels CUDA runs in each; imports no torch.
#
# Facts are of PyTorch's sources and release notes; docs/cuda-forms.md lists them with the
# files.

_TEXT = re.compile(r"(2\.|1\.(?=[89]\b|1[0-3]\b))(\d{1,2})(?:\.(\d{1,2}))?")
_ONE = 14
"""Minor releases of PyTorch 1: 2.0 followed 1.13."""
_LAST = 99
"""Stands for the last patch of a series, which a text without one means."""


class _From:
    """A fact of all releases from a minor one on."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __get__(self, release: Release, owner: type[Release]) -> bool:
        return release.minor >= self._first


@dataclass(frozen=True, order=True, slots=True)
class Release:
    """A release of PyTorch: 2.8, 2.5.1 or 1.13.  Without a patch it is the last of its series.

    minor: counted from 2.0 on, so that 1.13 has -1.
    """

    minor: int
    patch: int = _LAST

    def __str__(self) -> str:
        """Text that reads as this release: "2.8", "2.5.0"."""
        series = f"2.{self.minor}" if self.minor >= 0 else f"1.{_ONE + self.minor}"
        return series if self.patch == _LAST else f"{series}.{self.patch}"

    @property
    def linear_dims(self) -> int:
        """Dimensions of the widest input whose `linear` is one product, bias included.

        https://github.com/pytorch/pytorch/pull/74070 made it three in 1.12, and
        https://github.com/pytorch/pytorch/pull/106911 any number in 2.1.
        """
        return _LAST if self.minor >= 1 else 3 if self.minor >= 12 - _ONE else 2

    fuses_attention = _From(0)
    """Whether it has `scaled_dot_product_attention`, and fused kernels for it."""
    fuses_rms_norm = _From(9)
    """Whether `nn.RMSNorm` is one kernel (`_fused_rms_norm`); before, it is spelled out."""
    softmax_registers = _From(7)
    """Whether a softmax keeps rows of up to 9,216 in registers (`cunn_SoftMaxForwardReg`)."""

    @property
    def widest_flash(self) -> int:
        """The widest head of its flash attention: that of FlashAttention 1 up to 2.1."""
        return 256 if self.minor >= 2 else 128

    flash_is_square = _From(2)
    """Whether its flash attention takes a causal flag for square scores only, as 2 does."""
    efficient_takes_masks = _From(1)
    """Whether its memory-efficient attention takes a mask."""
    grouped_heads = _From(5)
    """Whether attention takes fewer heads of keys (`enable_gqa`)."""
    matches_attention = _From(1)
    """Whether Inductor makes hand-written attention one kernel (`fuse_attention.py`)."""
    lays_out_images = _From(1)
    """Whether Inductor may choose channels last for a step (`layout_optimization`)."""

    @property
    def prefers_cudnn(self) -> bool:
        """Whether cuDNN's attention comes first on sm_90 and sm_100, with its usual wheel.

        It did in 2.5.0, was last from 2.5.1 on, and is first again from 2.9 on; 2.10 asks for a
        newer cuDNN than most of its wheels bring.
        """
        return self == Release(5, 0) or self.minor == 9 or self.minor >= 11

    reorders_loops = _From(10)
    """Whether Inductor reorders loops of an op so that another one fits into its kernel.

    It could from 2.5 on (https://github.com/pytorch/pytorch/pull/126254), and does by default
    in 2.13 (`loop_ordering_after_fusion`); 2.10 is the first after the pull requests that
    prepared that (https://github.com/pytorch/pytorch/pull/162355).
    """
    views_masks = _From(7)
    """Whether its compiler passes a broadcast mask to attention as it is, and writes no copy.

    https://github.com/pytorch/pytorch/pull/146054
    """
    math_in_fp32 = _From(5)
    """Whether attention without a fused kernel computes halves in fp32."""


def read_release(text: str) -> Release:
    """A release from its text.  Raises RequestError for any other text."""
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise RequestError(
            f"--torch {text}: expected a release of PyTorch from 1.8 on, for example 2.8 or 2.5.1"
        )
    return _matched(match)


def _matched(match: re.Match[str]) -> Release:
    major, minor, patch = match.groups()
    counted = int(minor) - _ONE * (major == "1.")
    return Release(counted, _LAST if patch is None else int(patch))


@functools.cache
def installed_release() -> Release:
    """The release that is installed; of PyTorch 3 and later, the last of 2 in this table."""
    from importlib.metadata import version

    match = _TEXT.match(version("torch"))
    return Release(_LAST) if match is None else _matched(match)
