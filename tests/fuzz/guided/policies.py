"""Policies: of CreateRun and UpdatePolicy as messages, and of command lines as text.

The first byte says which, modulo 3; in an update the run has the policy of the last creation that was taken.
"""

from google.protobuf.message import DecodeError

from buffer_cli.policies import assign, changes, shown
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.presets import PRESETS
from buffer_service.rpc.convert.policies import QuotaBounds, merged, policy, to_policy
from buffer_wire.errors import InvalidField, InvalidPolicy
from rollout_buffer.v1 import runs_pb2
from tests.fuzz.guided.promises import refused_by_name

CREATE, UPDATE, TEXT = b"\0", b"\1", b"\2"
BOUNDS = (QuotaBounds(), QuotaBounds(groups=64), QuotaBounds(groups=1 << 20, tokens=1 << 40, bytes=1 << 40))

_FULL = to_policy(RunPolicy(batch_groups=4, max_uses=2, reuse_share_milli=500, reuse_max_staleness=4, stages=("a",)))
SEEDS = (
    *(
        CREATE + runs_pb2.CreateRunRequest(policy=runs_pb2.RunPolicy(preset=name)).SerializeToString()
        for name in PRESETS
    ),
    CREATE + runs_pb2.CreateRunRequest(policy=_FULL).SerializeToString(),
    UPDATE + runs_pb2.UpdatePolicyRequest(policy=_FULL, fields=["batch_groups", "stages"]).SerializeToString(),
    UPDATE + runs_pb2.UpdatePolicyRequest(policy=_FULL).SerializeToString(),
    TEXT + "\n".join(f"{name}={value}" for name, value in shown(_FULL)).encode(),
    TEXT + b"environments.a.b.share=3\nenvironments.a.b.starts_per_minute=9\norder=lifo\nstages=none\nstages=x, y",
)


def one(data: bytes) -> None:
    """A policy is refused by name, or is kept as it was given, wherever it goes."""
    kind = data[:1] or b"\0"
    try:
        if kind[0] % 3 == TEXT[0]:
            _text(data[1:].decode("utf-8", "replace"))
        elif kind[0] % 3 == UPDATE[0]:
            request = runs_pb2.UpdatePolicyRequest.FromString(data[1:])
            _kept(policy(merged(RunPolicy(), request.policy, request.fields) if request.fields else request.policy))
        else:
            _kept(policy(runs_pb2.CreateRunRequest.FromString(data[1:]).policy, BOUNDS[kind[0] // 3 % len(BOUNDS)]))
    except DecodeError:
        return
    except (InvalidField, InvalidPolicy) as error:
        refused_by_name(error)


def _text(text: str) -> None:
    message = runs_pb2.RunPolicy()
    assign(message, text.split("\n")[:64])
    again = runs_pb2.RunPolicy()
    assign(again, [f"{name}={value}" for name, value in shown(message) if name != "preset"])
    assert not list(changes(message, again)), "what is shown is not what was set"
    _kept(policy(message))


def _kept(effective: RunPolicy) -> None:
    assert policy(to_policy(effective)) == effective, "over the wire"
    assert RunPolicy.from_store(effective.to_store()) == effective, "over the store"
    assert effective.uncommitted_batches >= 1, "no batch"
    assert effective.least_staleness >= 0, "negative staleness"
