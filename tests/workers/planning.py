"""Collective updates as a fake trainer announces them, and how far a member is."""

from typing import Any

from rollout_buffer.v1 import common_pb2, weights_pb2
from tests.workers.loading import Loading

PREPARE = weights_pb2.PLAN_PHASE_PREPARE
BROADCAST = weights_pb2.PLAN_PHASE_BROADCAST
ABANDONED = weights_pb2.PLAN_PHASE_ABANDONED


def plan(
    version: int,
    phase: "weights_pb2.PlanPhase.ValueType",
    *,
    membership: int = 1,
    members: tuple[str, ...] = ("w.e0", "w.e1"),
    timeout_ms: int = 5_000,
    term: int = 1,
    established: bool = False,
    bucket_tensors: tuple[int, ...] = (),
) -> weights_pb2.CollectivePlan:
    return weights_pb2.CollectivePlan(
        version=common_pb2.WeightVersion(term=term, version=version),
        phase=phase,
        membership=membership,
        master_address="127.0.0.1",
        master_port=1,
        group_name=f"g{membership}",
        backend="gloo",
        world_size=len(members) + 1,
        members=[weights_pb2.PlanMember(engine_id=name, rank=i + 1) for i, name in enumerate(members)],
        tensors=[weights_pb2.TensorSpec(name="a", dtype="float32", shape=[2])],
        timeout_ms=timeout_ms,
        established=established,
        bucket_tensors=bucket_tensors,
    )


def broadcast_manifest(
    membership: int = 1, fallback: weights_pb2.FilesManifest | None = None
) -> weights_pb2.WeightManifest:
    return weights_pb2.WeightManifest(
        collective=weights_pb2.CollectiveManifest(membership=membership), fallback=fallback
    )


async def prepared(it: Loading, version: int = 1, **how: Any) -> None:
    await it.until_loaded(1, version - 1)
    await it.fake.announce(plan(version, PREPARE, **how))
    await it.fake.until(lambda: it.fake.engine().prepared.version == version)


async def received(it: Loading, version: int = 1, **how: Any) -> None:
    await prepared(it, version, **how)
    await it.fake.announce(plan(version, BROADCAST, **how))
    await it.fake.until(lambda: it.fake.engine().loaded.version == version)
