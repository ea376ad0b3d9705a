"""Records of what an op exchanges with other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct


class Group(Struct, frozen=True):
    """Processes that communicate with each other, by their ranks in the whole job.

    axis: the axis of the device mesh along which they lie ("dp"), several joined by "+" ("dp+cp");
    "" where no mesh is known.
    """

    ranks: tuple[int, ...]
    axis: str = ""

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.ranks)


class Collective(Struct, frozen=True):
    """What one op exchanges with other processes.

    kind: one of `COLLECTIVES` of systems.  group: a key of `OpGraph.groups`.  bytes: of the whole
    buffer, by the convention of nccl-tests: what a process has after an all_gather, what it has
    before a reduce_scatter, what it sends in an all_to_all (its own part included), and the tensor
    itself for all others.  dtype: its precision.  waits: whether the stream that issued it goes on
    only when it is done; else it runs beside, until something reads what it made.  splits: bytes to
    each process, where they differ.  peer: the other rank of send and recv.
    """

    kind: str
    group: str
    bytes: int
    dtype: str
    waits: bool = False
    splits: tuple[int, ...] = ()
    peer: int | None = None


def axis_of(ranks: Sequence[int], mesh: Mapping[str, int]) -> str:
    """The axes of a mesh along which these ranks lie, joined by "+"; "" where they lie otherwise.

    mesh: sizes by axis, outermost first; rank 0 is at the origin and the innermost axis runs
    fastest.  A group along an axis has all processes of the mesh that differ in that axis only.
    """
    places = [_place(rank, mesh) for rank in ranks]
    varying = [axis for axis in mesh if len({place[axis] for place in places}) > 1]
    expected = 1
    for axis in varying:
        expected *= mesh[axis]
    return "+".join(varying) if expected == len(set(ranks)) else ""


def _place(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """The coordinates of a rank."""
    place: dict[str, int] = {}
    for axis in reversed(list(mesh)):
        rank, place[axis] = divmod(rank, mesh[axis])
    return place


_OF_DATA = frozenset(
    {
        "dp",
        "ddp",
        "fsdp",
        "hsdp",
        "data",
        "batch",
        "replica",
        "replicas",
        "replicate",
        "shard",
        "dp_replicate",
        "dp_shard",
        "dp_cp",
        "dp_mod_ep",
    }
)
_OF_MODELS = frozenset({"tp", "sp", "cp", "ep", "pp", "etp", "tensor", "model", "expert", "pipe"})


def replicas_of(mesh: Mapping[str, int]) -> int | None:
    """How many batches a mesh works on at a time: the product of its axes of data.

    None where an axis has a name that says neither data nor model parallelism.
    """
    replicas = 1
    for axis, size in mesh.items():
        if axis in _OF_DATA:
            replicas *= size
        elif axis not in _OF_MODELS and size > 1:
            return None
    return replicas
