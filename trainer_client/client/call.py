"""One unary RPC as a value, which either client carries out.

Invariant: a call can be repeated as it is; only the seen revision is filled in anew.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, get_args

from google.protobuf.message import Message

from buffer_wire.errors import RolloutBufferError
from buffer_wire.revision import Revision
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import common_pb2, runs_pb2
from trainer_client.waiting import OnWait

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[ReplyT, T]):
    """One unary RPC. `run_id` is empty where the request concerns no single run."""

    method: str
    run_id: str
    doing: str
    """For notices and errors, for example "publishing version 3"."""
    build: Callable[[common_pb2.RunRef], Message]
    """The request, given what was last seen of the run."""
    reply: type[ReplyT]
    decode: Callable[[ReplyT], T]
    timeout_s: float | None = None
    """How long it is tried; None: as long as the client's options say."""
    on_wait: OnWait | None = None
    """Told of every try that came to nothing."""
    gone: type[RolloutBufferError] | None = None
    """What a repeat meets when the first try, whose answer was lost, has done it."""

    def was_done(self, error: RolloutBufferError, *, repeated: bool) -> bool:
        """True when the error of a call says that an earlier try of it took effect."""
        return repeated and self.gone is not None and isinstance(error, self.gone)


def documented(method: Callable[..., object], make: Callable[..., object]) -> None:
    """Give a client's method the docs and the signature of what makes its call."""
    signature = inspect.signature(make)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    result = get_args(signature.return_annotation)[-1]
    method.__name__ = method.__qualname__ = make.__name__
    method.__doc__ = make.__doc__
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=(itself, *signature.parameters.values()), return_annotation=result
    )


def serialize(message: Message) -> bytes:
    """A request as gRPC sends it."""
    return message.SerializeToString()


def note(revisions: Revisions, run_id: str, reply: Message) -> None:
    """Take the reply's revision into account. A run that was deleted, or that is new, has no past."""
    if isinstance(reply, runs_pb2.DeleteRunResponse):
        revisions.forget(run_id)
        return
    if isinstance(reply, runs_pb2.CreateRunResponse) and reply.created:
        revisions.forget(run_id)
    if isinstance(reply, runs_pb2.CreateRunResponse | runs_pb2.GetRunResponse):
        # A view acknowledges nothing: under wait_replicas it shows what no replica may have yet.
        return
    revisions.note(run_id, Revision.of(reply))  # type: ignore[arg-type]
