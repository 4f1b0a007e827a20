"""Evaluations in the asyncio client: the classes of `trainer_client.client.evaluation.blocking`, with coroutines.

    async with await client.evaluate("math", tasks, term=term) as evaluation:
        async for group in evaluation:
            scores.append(group.rewards.mean())

Groups come as they end; leaving the `async with` deletes their stored results.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from buffer_wire.connection.access import TokenSource
from buffer_wire.connection.retry import DEFAULT_BACKOFF, rpc_error
from buffer_wire.errors import Unauthenticated
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import evaluations_pb2 as pb
from trainer_client.batch import Group
from trainer_client.client.call import Call, serialize
from trainer_client.client.driver import PULL_SLICE_S, ClientOptions, Deadline, worth_repeating
from trainer_client.client.evaluation import calls as evaluations
from trainer_client.client.evaluation.calls import EvaluationState, Reading
from trainer_client.forks import Holder
from trainer_client.tasks import Task
from trainer_client.waiting import OnWait, WaitNotices

if TYPE_CHECKING:
    from trainer_client.state import WeightVersion

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")


class _Client(Protocol):
    """Part of the client that evaluations use."""

    _holder: Holder

    @property
    def target(self) -> str: ...

    @property
    def options(self) -> ClientOptions: ...

    @property
    def revisions(self) -> Revisions: ...

    @property
    def tokens(self) -> TokenSource: ...

    @property
    def _bulk(self) -> grpc.aio.Channel: ...

    async def _call(self, call: Call[ReplyT, T]) -> T: ...

    async def evaluation_state(self, run_id: str, eval_id: str) -> EvaluationState: ...

    async def delete_evaluation(self, run_id: str, eval_id: str) -> None: ...

    def read_evaluation(self, reading: Reading, timeout_s: float, on_wait: OnWait | None) -> AsyncIterator[Group]: ...


class AsyncEvaluation:
    """Evaluation of a run, submitted or found; as a context manager it is deleted at the end."""

    def __init__(self, client: _Client, run_id: str, state: EvaluationState) -> None:
        self.run_id = run_id
        self.eval_id = state.eval_id
        self.version: WeightVersion = state.version
        """Weight version that generates every token of the evaluation."""
        self._client = client
        self._state = state

    async def state(self) -> EvaluationState:
        """Read the evaluation's present state."""
        return await self._client.evaluation_state(self.run_id, self.eval_id)

    async def wait(self, timeout_s: float = 3600.0, *, on_wait: OnWait | None = None) -> EvaluationState:
        """Wait until every task has ended; fetches no group. Raises EvaluationNotReady after `timeout_s`."""
        reading = Reading(self.run_id, self._client.revisions, self._state, seen=self._state.tasks)
        async for _ in self._client.read_evaluation(reading, timeout_s, on_wait):
            pass
        return reading.state

    def groups(self, timeout_s: float = 3600.0, *, on_wait: OnWait | None = None) -> AsyncIterator[Group]:
        """Iterate over the groups in order of their ending, from the first, until all tasks have ended."""
        reading = Reading(self.run_id, self._client.revisions, self._state)
        return self._client.read_evaluation(reading, timeout_s, on_wait)

    def __aiter__(self) -> AsyncIterator[Group]:
        return self.groups()

    async def delete(self) -> None:
        """End the evaluation where it is and delete its results."""
        await self._client.delete_evaluation(self.run_id, self.eval_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()


class AsyncEvaluationCalls:
    """Mixin with the evaluation calls of AsyncBufferClient."""

    async def evaluate(
        self: _Client,
        run_id: str,
        tasks: Sequence[Task],
        *,
        term: int,
        version: int | None = None,
        eval_id: str | None = None,
    ) -> AsyncEvaluation:
        """Have tasks generated at one weight version, beside the training."""
        call = evaluations.submit(
            run_id, term=term, eval_id=eval_id or evaluations.new_eval_id(), version=version, tasks=tasks
        )
        return AsyncEvaluation(self, run_id, await self._call(call))

    async def evaluation(self: _Client, run_id: str, eval_id: str) -> AsyncEvaluation:
        """Find an evaluation that was submitted before. Raises UnknownEvaluation."""
        return AsyncEvaluation(self, run_id, await self._call(evaluations.evaluation_state(run_id, eval_id)))

    async def read_evaluation(
        self: _Client, reading: Reading, timeout_s: float, on_wait: OnWait | None
    ) -> AsyncIterator[Group]:
        """Yield the groups that a reading has not had yet, as they come.

        Raises EvaluationNotReady after `timeout_s`, ServiceUnreachable where nobody answered at that time.
        """
        self._holder.check()
        read = self._bulk.unary_stream(
            evaluations.READ_METHOD,
            request_serializer=serialize,
            response_deserializer=pb.ReadEvaluationResponse.FromString,
        )
        deadline = Deadline.after(timeout_s)
        notices = WaitNotices(f"reading evaluation {reading.state.eval_id!r}", self.target, on_wait)
        delays = DEFAULT_BACKOFF.delays()
        while True:
            wait_s = min(deadline.left_s(), PULL_SLICE_S)
            token = self.tokens.current
            stream = read(reading.request(wait_s), timeout=wait_s + self.options.transfer_timeout_s)
            try:
                async for message in stream:
                    delays = DEFAULT_BACKOFF.delays()
                    for group in reading.take(message):
                        yield group
            except grpc.RpcError as raised:
                error = rpc_error(raised)
                if isinstance(error, Unauthenticated) and self.tokens.renew(token):
                    continue
                if not worth_repeating(error) or deadline.left_s() == 0.0:
                    raise error from None
                notices.tell(error)
                await asyncio.sleep(min(next(delays), deadline.left_s()))
                continue
            finally:
                stream.cancel()
            if reading.complete:
                return
            if deadline.left_s() == 0.0:
                raise reading.state.not_ready()
            notices.tell(reading.state.not_ready())
