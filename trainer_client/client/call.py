"""Call: one unary RPC as a value, which either client carries out.

Invariant: a call can be repeated as it is; only the seen revision is filled in anew.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, get_args

from google.protobuf.message import Message

from buffer_wire.errors import RolloutBufferError
from buffer_wire.revision import Revision
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import common_pb2, payloads_pb2, runs_pb2
from trainer_client.waiting import OnWait

_OfPayloads: TypeAlias = payloads_pb2.PayloadAccess | payloads_pb2.ReadBlobResponse
ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[ReplyT, T]):
    """Call of one unary RPC. `run_id` is empty where the request concerns no single run."""

    method: str
    run_id: str
    doing: str
    """Description for notices and errors, for example "publishing version 3"."""
    build: Callable[[common_pb2.RunRef], Message]
    """Builder of the request, given the run's id and the revision last seen."""
    reply: type[ReplyT]
    decode: Callable[[ReplyT], T]
    timeout_s: float | None = None
    """Longest time, in seconds, over which the call is repeated; None: the client's option."""
    on_wait: OnWait | None = None
    """Callback for every try that failed and is repeated."""
    before: "Sequence[tuple[str, Call[Any, Any]]]" = ()
    """Calls to carry out before it, each by its name once, and again after a call that `renews` the run."""
    renews: bool = False
    """True when the run behind its id may be another one from then on."""
    gone: type[RolloutBufferError] | None = None
    """Error that a repeat meets when the first try took effect but its answer was lost; None: no such error."""

    def was_done(self, error: RolloutBufferError, *, repeated: bool) -> bool:
        """True when `error` shows that an earlier try of the call took effect."""
        return repeated and self.gone is not None and isinstance(error, self.gone)


def documented(method: Callable[..., object], make: Callable[..., object]) -> None:
    """Give a client's method the docstring and the signature of the builder of its call."""
    signature = inspect.signature(make)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    result = get_args(signature.return_annotation)[-1]
    method.__name__ = method.__qualname__ = make.__name__
    method.__doc__ = make.__doc__
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=(itself, *signature.parameters.values()), return_annotation=result
    )


def serialize(message: Message) -> bytes:
    """Serialize a request for gRPC."""
    return message.SerializeToString()


def note(revisions: Revisions, run_id: str, reply: Message) -> None:
    """Record the reply's revision. The record of a run that was deleted, or that is new, starts afresh."""
    if isinstance(reply, runs_pb2.DeleteRunResponse):
        revisions.forget(run_id)
        return
    if isinstance(reply, runs_pb2.CreateRunResponse) and reply.created:
        revisions.forget(run_id)
    if isinstance(reply, runs_pb2.CreateRunResponse | runs_pb2.GetRunResponse | _OfPayloads):
        # A view acknowledges nothing: under wait_replicas it shows what no replica may have yet. Others have none.
        return
    revisions.note(run_id, Revision.of(reply))  # type: ignore[arg-type]
