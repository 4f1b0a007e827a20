import asyncio
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from buffer_wire.connection.retry import Backoff, Retry
from buffer_wire.errors import InvalidField, PendingFull, RolloutBufferError, UnknownRun, UnprovenRevision
from buffer_wire.revision import Revision
from buffer_wire.revisions import Revisions
from buffer_wire.status import ServiceUnreachable, status_of

QUICK = Backoff(first_s=0.001, ceiling_s=0.002)


def rpc_error(error: RolloutBufferError | None = None) -> grpc.aio.AioRpcError:
    if error is None:
        return grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Connection reset", None
        )
    code, details, trailing = status_of(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details, None)


def failing(*errors: Exception) -> Callable[[], str]:
    """Raises the errors one after another, then returns."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def repeat(how: str, call: Callable[[], str], **options: Any) -> str:
    """`call` in one of the two ways."""
    options = {"deadline_s": 5.0, "waiting_on": "the service", "backoff": QUICK, **options}
    if how == "sync":
        return Retry(**options).blocking(call)

    async def as_coroutine() -> str:
        return call()

    async def run() -> str:
        return await Retry(**options).asyncio(as_coroutine)

    return asyncio.run(run())


both = pytest.mark.parametrize("how", ["sync", "async"])


@both
def test_errors_that_pass_are_waited_out(how: str) -> None:
    assert repeat(how, failing(rpc_error(), rpc_error(PendingFull(3, 2)), PendingFull(3, 2))) == "done"


@both
def test_error_that_no_repeat_can_mend_is_raised_translated(how: str) -> None:
    call = failing(rpc_error(InvalidField("a", 1, "2")), rpc_error())
    with pytest.raises(InvalidField) as caught:
        repeat(how, call)
    assert caught.value.attributes["field"] == "a"
    assert isinstance(caught.value.__cause__, grpc.RpcError)


@both
def test_caller_decides_what_is_worth_a_repeat(how: str) -> None:
    call = failing(rpc_error(UnknownRun("r")))
    assert repeat(how, call, retry_on=lambda error: isinstance(error, UnknownRun)) == "done"


@both
def test_deadline_raises_the_last_error_with_a_note_on_whom_it_waited(how: str) -> None:
    def always() -> str:
        raise rpc_error()

    with pytest.raises(ServiceUnreachable, match="Connection reset") as caught:
        repeat(how, always, deadline_s=0.02)
    assert "waiting on the service" in caught.value.__notes__[0]
    assert "attempts" in caught.value.__notes__[0]


@both
def test_an_answer_that_the_service_waited_for_is_asked_for_again_soon_and_ends_the_doubling(how: str) -> None:
    waits: list[float] = []
    pausing = Backoff(0.01, 10.0, pause=lambda error: 0.001 if isinstance(error, PendingFull) else None)
    call = failing(rpc_error(), rpc_error(), rpc_error(PendingFull(3, 2)), rpc_error())
    assert repeat(how, call, backoff=pausing, on_retry=lambda _error, _attempts, wait_s: waits.append(wait_s)) == "done"
    assert 0.01 <= waits[1] <= 0.02
    assert waits[2] == 0.001
    assert waits[3] <= 0.01


@both
def test_an_answer_that_says_on_whom_it_waited_needs_no_note(how: str) -> None:
    def always() -> str:
        raise PendingFull(3, 2)

    with pytest.raises(PendingFull) as caught:
        repeat(how, always, deadline_s=0.02, backoff=Backoff(pause=lambda _: 0.001))
    assert not hasattr(caught.value, "__notes__")


@both
def test_other_exceptions_pass_through(how: str) -> None:
    with pytest.raises(KeyError):
        repeat(how, failing(KeyError("bug")))


@both
def test_waits_are_told_before_they_begin(how: str) -> None:
    told: list[tuple[str, int]] = []
    repeat(how, failing(rpc_error(), rpc_error()), on_retry=lambda error, n, _: told.append((error.reason, n)))
    assert told == [("service_unreachable", 1), ("service_unreachable", 2)]


def test_waits_double_up_to_the_ceiling_and_are_spread() -> None:
    for _ in range(20):
        delays = list(itertools.islice(Backoff(first_s=0.1, ceiling_s=1.0).delays(), 8))
        for delay, limit in zip(delays, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
            assert limit / 2 <= delay <= limit


def test_seen_revision_never_falls() -> None:
    revisions = Revisions()
    assert revisions.ref("r").seen_revision == 0
    for revision in (3, 7, 5):
        revisions.note("r", Revision(revision, f"of {revision}"))
    revisions.note("other", Revision(9, "of 9"))
    # Of a view.
    revisions.note("r", Revision(12))
    ref = revisions.ref("r")
    assert (ref.run_id, ref.seen_revision, ref.seen_proof) == ("r", 7, "of 7")
    assert revisions.seen("other") == 9


def test_a_revision_of_an_earlier_run_is_forgotten_and_the_call_repeated() -> None:
    revisions, claimed = Revisions(), []
    revisions.note("r", Revision(7, "of another run"))

    def call() -> str:
        claimed.append(revisions.ref("r").seen_revision)
        if claimed[-1]:
            raise UnprovenRevision("r", claimed[-1], 3)
        return "done"

    mend = partial(revisions.met, "r")
    assert Retry(deadline_s=0, waiting_on="the service", mend=mend).blocking(call) == "done"
    assert claimed == [7, 0]

    def refuse() -> str:
        raise UnprovenRevision("r", 0, 3)

    with pytest.raises(UnprovenRevision):
        Retry(deadline_s=9, waiting_on="the service", mend=mend).blocking(refuse)


def test_revisions_are_shared_by_threads() -> None:
    revisions = Revisions()

    def note_every_fourth(first: int) -> None:
        for revision in range(first, 4_000, 4):
            revisions.note("r", Revision(revision, "p"))

    threads = [threading.Thread(target=note_every_fourth, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert revisions.seen("r") == 3_999
