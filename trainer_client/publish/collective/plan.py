"""Plan of a collective update, as the trainer announces it: members, meeting point, and the order of the tensors."""

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from buffer_wire.enums import words
from rollout_buffer.v1 import weights_pb2 as pb
from trainer_client.state import WeightVersion

Phase: TypeAlias = Literal["prepare", "broadcast", "abandoned"]
_PHASES = words(pb.PlanPhase)

Backend: TypeAlias = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Spec of one tensor of an update. `dtype` is torch's name without its prefix, as in "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanMember:
    """Member of the process group: an engine; `rank` is its first rank, from 1. The trainer is rank 0."""

    engine_id: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """Plan of one attempt at one version, in one phase."""

    version: WeightVersion
    """Version to come, above the published one, in the trainer's term."""
    phase: Phase
    membership: int
    """Number of the process group, rising."""
    master_address: str
    """Address at which the group meets, as the engines reach it."""
    master_port: int
    group_name: str
    backend: Backend
    world_size: int
    """Number of ranks, the trainer's included."""
    members: tuple[PlanMember, ...]
    tensors: tuple[TensorSpec, ...]
    """Specs of the tensors, in the order in which they are sent."""
    timeout_ms: int
    """Longest time for joining, and again for receiving."""
    established: bool = False
    """True when the group exists, with every member in it."""
    bucket_tensors: tuple[int, ...] = ()
    """Number of tensors in each bucket, in order; empty: each is sent by itself."""

    def to_wire(self) -> pb.CollectivePlan:
        """Convert to the wire's CollectivePlan."""
        return pb.CollectivePlan(**asdict(self) | {"phase": _PHASES[self.phase]})
