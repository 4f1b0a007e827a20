"""A planned collective update, as the workers of its members read it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rollout_buffer.v1 import weights_pb2
from rollout_workers.engine.types import ProcessGroup, TensorSpec
from rollout_workers.versions import Version


class Phase(enum.Enum):
    """Phase of a collective weight update: its members join and pause, they receive, or it is given up."""

    PREPARE = weights_pb2.PLAN_PHASE_PREPARE
    BROADCAST = weights_pb2.PLAN_PHASE_BROADCAST
    ABANDONED = weights_pb2.PLAN_PHASE_ABANDONED


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a collective update: who takes part, where the members meet, and what is sent."""

    version: Version
    membership: int
    phase: Phase
    ranks: Mapping[str, int]
    """Ranks of the members by engine_id, from 1."""
    group_name: str
    backend: str
    master_address: str
    master_port: int
    world_size: int
    tensors: tuple[TensorSpec, ...]
    """Tensors in the order in which they are sent."""
    buckets: tuple[int, ...]
    """Number of tensors in each bucket, in order; empty: each is sent by itself."""
    timeout_s: float
    """Timeout of joining, and of receiving."""
    established: bool
    """The group exists, with every member in it: nobody can join any more."""

    @classmethod
    def of(cls, wire: weights_pb2.CollectivePlan) -> Self:
        """Plan of a message; a phase that is not known here counts as given up."""
        known = {phase.value: phase for phase in Phase}
        return cls(
            version=Version.of(wire.version),
            membership=wire.membership,
            phase=known.get(wire.phase, Phase.ABANDONED),
            ranks={member.engine_id: member.rank for member in wire.members},
            group_name=wire.group_name,
            backend=wire.backend,
            master_address=wire.master_address,
            master_port=wire.master_port,
            world_size=wire.world_size,
            tensors=tuple(TensorSpec(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in wire.tensors),
            buckets=tuple(wire.bucket_tensors),
            timeout_s=wire.timeout_ms / 1000,
            established=wire.established,
        )

    @property
    def key(self) -> tuple[Version, int]:
        """Key that stays the same over the plan's phases."""
        return self.version, self.membership

    def process_group_of(self, engine_id: str) -> ProcessGroup:
        """A member's place. Raises KeyError for an engine that is none."""
        return ProcessGroup(
            group_name=self.group_name,
            backend=self.backend,
            master_address=self.master_address,
            master_port=self.master_port,
            rank=self.ranks[engine_id],
            world_size=self.world_size,
        )
