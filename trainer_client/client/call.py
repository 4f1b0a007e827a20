"""Call: one unary RPC as a value, which either client carries out.

Invariant: a call can be repeated as it is; only the seen revision is filled in anew.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
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

MOST_MADE = 65_536
"""Names of calls that a client remembers over all its runs, some 20 MB: a run of the smallest images needs more."""


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


class MadeBefore:
    """Calls that were made before others, by run and name: the last MOST_MADE of them.

    Invariant: a call that stands before another may be made again, and then changes nothing. So one that is forgotten
    costs its bytes alone.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], None] = {}
        self._changing = threading.Lock()

    def lacking(self, call: Call[Any, Any]) -> "Iterator[tuple[str, Call[Any, Any]]]":
        """Yield what is still to be made before `call`, by name."""
        for name, first in call.before:
            if (call.run_id, name) not in self._names:
                yield name, first

    def note(self, run_id: str, name: str) -> None:
        """Remember that a call was made."""
        with self._changing:
            self._names[run_id, name] = None
            while len(self._names) > MOST_MADE:
                del self._names[next(iter(self._names))]

    def forget(self, run_id: str) -> None:
        """Forget all calls of a run, which may be another one now."""
        with self._changing:
            self._names = {made: None for made in self._names if made[0] != run_id}


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
