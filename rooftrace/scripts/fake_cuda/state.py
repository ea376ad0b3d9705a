"""State of a fake CUDA device: its facts, clock and meter, and its errors."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rooftrace.errors import RequestError, TraceError
from rooftrace.hardware import Chip
from rooftrace.tracer import source_line

# -- refused ---------------------------------------------------------------------------------------
# Refusals of an emulated device: one error that names the call, its line and a way out.

_RULES = (
    "To count a kernel of your own, make it an op with torch.library.custom_op and a "
    "register_fake, and give it a rule with rooftrace.extend.rule (docs/rules.md)"
)


class DeviceError(TraceError):
    """A call that needs a real device: names it, the user's line, and an alternative."""

    @classmethod
    def of(cls, call: str, reason: str, instead: str = "") -> DeviceError:
        """The error about one call.

        call: as the user writes it.  reason: why no emulated device can answer.  instead: what to
        do, a sentence without its full stop.
        """
        line = source_line(2)
        at = f" at {line}" if line else ""
        text = f"{call}{at} needs a GPU, and this one is emulated: {reason}"
        return cls(f"{text}. {instead}" if instead else text)


class MissingExtensionError(DeviceError, ImportError):
    """A compiled extension for CUDA is imported: code that has another way may catch it."""


class MissingLibraryError(DeviceError, OSError):
    """A compiled library for CUDA is loaded: code that has another way may catch it."""


def refusal(call: str, reason: str, instead: str = "") -> Callable[..., Any]:
    """A function that fails with the error about `call`."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise DeviceError.of(call, reason, instead)

    return refused


def kernel_refused(call: str, kind: type[DeviceError] = DeviceError) -> DeviceError:
    """The error about code that was compiled for a GPU."""
    return kind.of(call, "its kernels cannot be seen, so their cost is not known", _RULES)


# -- facts -----------------------------------------------------------------------------------------
# Facts of torch.cuda on a device: its name, capability, memory and properties, from a chip.
#
# Chip files know architecture, memory, units, L2, clock and bus.  What they do not know (the name
# that the driver gives) stands in a table here; facts of a GPU in a slot (its number on the
# bus) are made up.

_NAMED: dict[str, str] = {
    "a10": "NVIDIA A10",
    "a100-pcie-40": "NVIDIA A100-PCIE-40GB",
    "a100-pcie-80": "NVIDIA A100 80GB PCIe",
    "a100-sxm-40": "NVIDIA A100-SXM4-40GB",
    "a100-sxm-80": "NVIDIA A100-SXM4-80GB",
    "a10g": "NVIDIA A10G",
    "a30": "NVIDIA A30",
    "a800-pcie-80": "NVIDIA A800 80GB PCIe",
    "a800-sxm-80": "NVIDIA A800-SXM4-80GB",
    "b200-sxm": "NVIDIA B200",
    "b300-sxm": "NVIDIA B300 SXM6 AC",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "gh200-144": "NVIDIA GH200 144G HBM3e",
    "gh200-96": "NVIDIA GH200 480GB",
    "h100-nvl": "NVIDIA H100 NVL",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h100-sxm": "NVIDIA H100 80GB HBM3",
    "h20": "NVIDIA H20",
    "h200-sxm": "NVIDIA H200",
    "h800-sxm": "NVIDIA H800",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "mi300x": "AMD Instinct MI300X",
    "mi325x": "AMD Instinct MI325X",
    "mi350x": "AMD Instinct MI350X",
    "mi355x": "AMD Instinct MI355X",
    "rtx-3080": "NVIDIA GeForce RTX 3080",
    "rtx-3090": "NVIDIA GeForce RTX 3090",
    "rtx-3090-ti": "NVIDIA GeForce RTX 3090 Ti",
    "rtx-4070-ti-super": "NVIDIA GeForce RTX 4070 Ti SUPER",
    "rtx-4080": "NVIDIA GeForce RTX 4080",
    "rtx-4080-super": "NVIDIA GeForce RTX 4080 SUPER",
    "rtx-4090": "NVIDIA GeForce RTX 4090",
    "rtx-5070": "NVIDIA GeForce RTX 5070",
    "rtx-5070-ti": "NVIDIA GeForce RTX 5070 Ti",
    "rtx-5080": "NVIDIA GeForce RTX 5080",
    "rtx-5090": "NVIDIA GeForce RTX 5090",
    "rtx-6000-ada": "NVIDIA RTX 6000 Ada Generation",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "rtx-pro-6000-max-q": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "t4": "Tesla T4",
    "v100-pcie-16": "Tesla V100-PCIE-16GB",
    "v100-pcie-32": "Tesla V100-PCIE-32GB",
    "v100-sxm2-16": "Tesla V100-SXM2-16GB",
    "v100-sxm2-32": "Tesla V100-SXM2-32GB",
}
"""Names as drivers list them."""

_PER_SM: dict[tuple[int, int], tuple[int, int]] = {
    (7, 0): (2048, 96),
    (7, 5): (1024, 64),
    (8, 0): (2048, 164),
    (8, 6): (1536, 100),
    (8, 9): (1536, 100),
    (9, 0): (2048, 228),
    (9, 4): (2048, 64),
    (9, 5): (2048, 160),
    (10, 0): (2048, 228),
    (10, 3): (2048, 228),
    (12, 0): (1536, 100),
}
"""Resident threads and KiB of shared memory: CUDA C++ Programming Guide, compute capabilities; of
AMD's as the table of its GPUs has them, https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"""

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Device:
    """Facts of a fake device.  None: unknown, and an error when code asks for it.

    name: as `torch.cuda.get_device_name()` says.  memory: bytes in total, as nvidia-smi lists
    them; reserved: those of a process outside of its allocator.  clock: hertz.  count: devices of
    this node.  guessed: which of these were inferred from the chip's rates.
    """

    name: str
    architecture: str  # torch's compile target: "sm_90", "gfx942"
    memory: int
    multiprocessors: int
    count: int = 1
    vendor: str = "NVIDIA"
    context: int = 0
    l2: int | None = None
    clock: float | None = None
    bus: int | None = None  # bits
    guessed: tuple[str, ...] = ()

    @classmethod
    def of(cls, chip: Chip, count: int = 1) -> Device:
        """The device that a chip would be; a chip of the user's keeps its name."""
        if chip.kind != "gpu":
            raise RequestError(
                f"{chip.name} is a {chip.kind.upper()}: a CUDA device is emulated of a GPU"
            )
        if count < 1:
            raise RequestError(f"count={count}: expected one device of the node or more")
        guessed = [] if chip.architecture else ["capability"]
        if chip.sm_count is None:
            guessed.append("multiprocessors")
        return cls(
            name=_NAMED.get(chip.name, chip.name),
            architecture=chip.architecture or _architecture_by_rates(chip),
            memory=int(chip.memory_capacity.value),
            multiprocessors=int(chip.sm_count.value) if chip.sm_count else 1,
            count=count,
            vendor=chip.vendor,
            context=int(chip.context.value),
            l2=int(chip.l2_capacity.value) if chip.l2_capacity else None,
            clock=chip.clock.value if chip.clock else None,
            bus=int(chip.memory_bus.value) if chip.memory_bus else None,
            guessed=tuple(guessed),
        )

    @property
    def is_rocm(self) -> bool:
        """Whether torch would be a build for ROCm, which says cuda too."""
        return self.vendor == "AMD"

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) of "sm_90"; (9, 4) of "gfx942"."""
        digits = self.architecture.removeprefix("sm_")
        if self.architecture.startswith("gfx"):
            digits = self.architecture.removeprefix("gfx")[:-1]
        return int(digits[:-1]), int(digits[-1], 16)

    def properties(self, index: int) -> Properties:
        """The result of `torch.cuda.get_device_properties(index)`."""
        threads, shared = _PER_SM.get(self.capability, (2048, 100))
        major, minor = self.capability
        properties: dict[str, Any] = {
            "name": self.name,
            "major": major,
            "minor": minor,
            "total_memory": self.memory,
            "multi_processor_count": self.multiprocessors,
            "is_integrated": 0,
            "is_multi_gpu_board": 0,
            "max_threads_per_multi_processor": threads,
            "max_threads_per_block": 1024,
            "warp_size": 64 if self.is_rocm else 32,
            "regs_per_multiprocessor": 65536,
            "shared_memory_per_block": 48 * _KIB,
            "shared_memory_per_block_optin": (shared - 1) * _KIB,
            "shared_memory_per_multiprocessor": shared * _KIB,
            "gcnArchName": self.architecture if self.is_rocm else self.name,
            "uuid": uuid.uuid5(uuid.NAMESPACE_DNS, f"{self.name}/{index}"),
            "pci_bus_id": index + 1,
            "pci_device_id": 0,
            "pci_domain_id": 0,
            "L2_cache_size": self.l2,
            "clock_rate": self.clock and int(self.clock / 1000),  # kHz
            "memory_bus_width": self.bus,
        }
        return Properties(properties)


class Properties:
    """Stands for torch's properties of a device: the same attributes, where the chip has them."""

    def __init__(self, properties: dict[str, Any]) -> None:
        vars(self).update({name: item for name, item in properties.items() if item is not None})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DeviceError.of(
            f"get_device_properties().{name}",
            "the chip's file does not say it; no op depends on it",
        )

    def __repr__(self) -> str:
        properties = vars(self)
        l2 = properties.get("L2_cache_size")
        tail = "" if l2 is None else f", L2_cache_size={l2 // _MIB}MB"
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // _MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}{tail})"
        )


def _architecture_by_rates(chip: Chip) -> str:
    """The earliest architecture of NVIDIA that has the chip's kinds of tensor cores."""
    kinds = (("fp4", "sm_100"), ("fp8", "sm_90"), ("bf16", "sm_80"))
    return next((name for kind, name in kinds if chip.has_peak("matrix", kind)), "sm_70")


# -- state -----------------------------------------------------------------------------------------

Assume = Callable[[str, str], None]
"""Takes the kind and the text of an assumption."""
Tell = Callable[[Literal["capture", "captured", "replay", "replayed"]], None]
"""Takes events of a CUDA graph: its capture or a replay of it begins, or has ended."""
Answers = tuple[Any, dict[str, Any]]
"""A module or a class of torch, and its attributes that the emulated device answers, by name."""


class Meter(Protocol):
    """Memory of the device, as a recording knows it; bytes."""

    def allocated(self) -> int:
        """Bytes alive now."""

    def peak(self) -> int:
        """The largest number of bytes alive since the last reset."""

    def reset_peak(self) -> None:
        """The peak becomes the bytes alive now."""


class Clock(Protocol):
    """Time of the host and the device: simulated, or that of this machine."""

    def synchronize(self) -> None:
        """The host waits until the device has done all that was launched."""

    def device_seconds(self) -> float:
        """When the device will have done all that was launched so far; seconds."""


class _ThreadDevice(threading.local):
    index: int | None = None  # the device that the thread chose


class Emulation:
    """One emulation.  index: the device of this process, of `device.count`.

    initialized: whether a call has initialized torch.cuda.
    settings: values that the code set and may read again, by name.
    """

    def __init__(
        self,
        device: Device,
        meter: Meter,
        clock: Clock,
        index: int = 0,
        assume: Assume | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.device, self.meter, self.clock, self.index = device, meter, clock, index
        self.tell: Tell = tell or (lambda event: None)
        self.initialized = False
        self.settings: dict[str, object] = {}
        self._assume = assume
        self._assumed: set[str] = set()
        self._thread = _ThreadDevice()
        self._visible = os.environ.get(_VISIBLE)

    def assume(self, kind: str, text: str) -> None:
        """Tell of an answer that follows a policy, once for each kind."""
        if self._assume is not None and kind not in self._assumed:
            self._assumed.add(kind)
            self._assume(kind, text)

    @property
    def used(self) -> bool:
        """Whether torch.cuda is initialized: a first call or a first tensor does that."""
        return self.initialized or self.meter.allocated() > 0

    @property
    def count(self) -> int:
        """The devices that the code sees: fewer where it set CUDA_VISIBLE_DEVICES itself."""
        visible = os.environ.get(_VISIBLE)
        if visible is None or visible == self._visible:
            return self.device.count
        names = [name.strip() for name in visible.split(",")]
        seen = 0
        for name in names:
            if (name.isdigit() and int(name) >= self.device.count) or name in ("", "-1"):
                break  # as CUDA does: devices after an unknown one are not seen
            seen += 1
        return seen

    @property
    def current(self) -> int:
        """The device that the running thread chose."""
        chosen = self._thread.index
        return min(self.index, max(self.count - 1, 0)) if chosen is None else chosen

    def choose(self, index: int) -> None:
        """From here on the running thread uses this device; a negative number changes nothing."""
        if index < 0:
            return
        if index >= self.count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: device {index} of {self.count} emulated"
            )
        self._thread.index = index

    def exchange(self, index: int) -> int:
        """The device that the running thread used up to here; from here on it is `index`."""
        if index < 0:
            return -1
        before = self.current
        self.choose(index)
        return before


_VISIBLE = "CUDA_VISIBLE_DEVICES"
