"""What torch.cuda says of a device: its name, capability, memory and properties, from a chip.

Chip files know memory, units, L2, clock and bus.  What they do not know (the name that the driver
gives, the compute capability) stands in a table here; what only a GPU in a slot has (its number on
the bus) is made up.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.tracer.emulation.refused import DeviceError

_NAMED: dict[str, tuple[str, tuple[int, int]]] = {
    "a100-pcie-40": ("NVIDIA A100-PCIE-40GB", (8, 0)),
    "a100-pcie-80": ("NVIDIA A100 80GB PCIe", (8, 0)),
    "a100-sxm-40": ("NVIDIA A100-SXM4-40GB", (8, 0)),
    "a100-sxm-80": ("NVIDIA A100-SXM4-80GB", (8, 0)),
    "b200-sxm": ("NVIDIA B200", (10, 0)),
    "h100-sxm": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "h200-sxm": ("NVIDIA H200", (9, 0)),
    "l4": ("NVIDIA L4", (8, 9)),
    "l40s": ("NVIDIA L40S", (8, 9)),
    "mi300x": ("AMD Instinct MI300X", (9, 4)),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", (8, 6)),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", (8, 9)),
    "rtx-5090": ("NVIDIA GeForce RTX 5090", (12, 0)),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0)),
    "rtx-pro-6000-max-q": ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0)),
}
"""Names as drivers list them; capabilities by https://developer.nvidia.com/cuda-gpus, gfx942."""

_PER_SM: dict[tuple[int, int], tuple[int, int]] = {
    (7, 0): (2048, 96),
    (7, 5): (1024, 64),
    (8, 0): (2048, 164),
    (8, 6): (1536, 100),
    (8, 9): (1536, 100),
    (9, 0): (2048, 228),
    (9, 4): (2048, 64),
    (10, 0): (2048, 228),
    (12, 0): (1536, 100),
}
"""Resident threads and KiB of shared memory: CUDA C++ Programming Guide, compute capabilities."""

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Device:
    """What an emulated device says of itself.  None: not known, and an error where it is asked.

    name: what `torch.cuda.get_device_name()` says.  memory: bytes in total, as nvidia-smi lists
    them; reserved: those of a process outside of its allocator.  clock: hertz.  count: devices of
    this node.  guessed: which of these were inferred from the chip's rates.
    """

    name: str
    capability: tuple[int, int]
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
        """The device that a chip would be; a chip of the user's keeps its own name."""
        if chip.kind != "gpu":
            raise RequestError(
                f"{chip.name} is a {chip.kind.upper()}: a CUDA device is emulated of a GPU"
            )
        if count < 1:
            raise RequestError(f"count={count}: expected one device of the node or more")
        name, capability = _NAMED.get(chip.name, (chip.name, None))
        guessed = []
        if capability is None:
            guessed.append("capability")
            capability = _capability_by_rates(chip)
        if chip.sm_count is None:
            guessed.append("multiprocessors")
        return cls(
            name=name,
            capability=capability,
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
    def architecture(self) -> str:
        """What torch is compiled for: "sm_90", "gfx942"."""
        major, minor = self.capability
        return f"gfx{major}{minor}2" if self.is_rocm else f"sm_{major}{minor}"

    def properties(self, index: int) -> Properties:
        """What `torch.cuda.get_device_properties(index)` returns."""
        threads, shared = _PER_SM.get(self.capability, (2048, 100))
        major, minor = self.capability
        known: dict[str, Any] = {
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
        return Properties(known)


class Properties:
    """Stands for torch's properties of a device: the same attributes, where they are known."""

    def __init__(self, known: dict[str, Any]) -> None:
        vars(self).update({name: item for name, item in known.items() if item is not None})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DeviceError.of(
            f"get_device_properties().{name}",
            "the chip's file does not say it; no op depends on it",
        )

    def __repr__(self) -> str:
        own = vars(self)
        l2 = own.get("L2_cache_size")
        tail = "" if l2 is None else f", L2_cache_size={l2 // _MIB}MB"
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // _MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}{tail})"
        )


def _capability_by_rates(chip: Chip) -> tuple[int, int]:
    """The earliest capability that has the chip's kinds of tensor cores."""
    for precision, capability in (("fp4", (10, 0)), ("fp8", (9, 0)), ("bf16", (8, 0))):
        if chip.has_peak("matrix", precision):
            return capability
    return (7, 0)
