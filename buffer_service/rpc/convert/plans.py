"""Collective plans. A plan is kept as its deterministic bytes, so that equal ones compare equal."""

import re

from buffer_service.domain import ops
from buffer_service.rpc.convert import fields
from buffer_wire import limits
from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import weights_pb2 as pb

_PHASES = words(pb.PlanPhase)
_BACKENDS = ("gloo", "nccl")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_U32 = (1 << 32) - 1


def plan_collective(request: pb.PlanCollectiveRequest) -> ops.PlanCollective:
    """A checked plan."""
    plan = request.plan
    # First: what follows looks at each of its parts.
    packed = fields.size(plan.SerializeToString(deterministic=True), "plan", limits.MAX_PLAN_BYTES)
    term = fields.term(request.term)
    if plan.version.term != term:
        raise InvalidField("plan.version.term", plan.version.term, f"{term}, the term of the request")
    version = fields.number(plan.version.version, "plan.version.version", 1, limits.MAX_VERSION)
    if plan.phase not in _PHASES.values():
        raise InvalidField("plan.phase", plan.phase, f"one of {', '.join(_PHASES).upper()}")
    fields.number(plan.membership, "plan.membership", 1, limits.MAX_INTEGER)
    fields.line(plan.master_address, "plan.master_address", 1, 256)
    fields.number(plan.master_port, "plan.master_port", 1, 65_535)
    fields.name(plan.group_name, "plan.group_name")
    if plan.backend not in _BACKENDS:
        raise InvalidField("plan.backend", plan.backend, " or ".join(_BACKENDS))
    fields.number(plan.timeout_ms, "plan.timeout_ms", 100, 3_600_000)
    _check_members(plan)
    _check_tensors(plan)
    _check_buckets(plan)
    return ops.PlanCollective(term, version, packed)


def _check_members(plan: pb.CollectivePlan) -> None:
    fields.count(plan.members, "plan.members", 1, 1_024)
    fields.number(plan.world_size, "plan.world_size", 1 + len(plan.members), _U32)
    for i, member in enumerate(plan.members):
        fields.name(member.engine_id, f"plan.members[{i}].engine_id")
        fields.number(member.rank, f"plan.members[{i}].rank", 1, plan.world_size - 1)
    fields.unique((member.engine_id for member in plan.members), "plan.members", ".engine_id")
    fields.unique((member.rank for member in plan.members), "plan.members", ".rank")


def _check_tensors(plan: pb.CollectivePlan) -> None:
    fields.count(plan.tensors, "plan.tensors", 1, 65_536)
    # There may be many thousands: a field's path is only made for the one that is refused.
    names = [tensor.name for tensor in plan.tensors]
    for i, tensor in enumerate(plan.tensors):
        if not (1 <= len(names[i]) <= 512 and _DTYPE.fullmatch(tensor.dtype) and len(tensor.shape) <= 8):
            _refuse_tensor(tensor, f"plan.tensors[{i}]")
    if len(set(names)) < len(names):
        fields.unique(names, "plan.tensors", ".name")


def _check_buckets(plan: pb.CollectivePlan) -> None:
    inside = sum(plan.bucket_tensors)
    if plan.bucket_tensors and (inside != len(plan.tensors) or not all(plan.bucket_tensors)):
        limit = f"none empty, with all of the plan's {len(plan.tensors)} tensors"
        raise InvalidField("plan.bucket_tensors", f"{len(plan.bucket_tensors)} with {inside} tensors", limit)


def _refuse_tensor(tensor: pb.TensorSpec, at: str) -> None:
    fields.line(tensor.name, f"{at}.name", 1, 512)
    if not _DTYPE.fullmatch(tensor.dtype):
        raise InvalidField(f"{at}.dtype", tensor.dtype[:64], "torch's name without its prefix, as in bfloat16")
    fields.count(tensor.shape, f"{at}.shape", 0, 8)
