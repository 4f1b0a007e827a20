"""Clients and sessions in a process that forks: the child connects anew or says why not, the parent notices nothing.

What a child tells comes through a pipe; it ends without unwinding what it inherited from pytest.
"""

import asyncio
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from buffer_wire.errors import StaleTerm
from tests.support.push import Pusher, arrays_for
from tests.support.service import ServiceProcess
from trainer_client import AsyncBufferClient, BufferClient, ClientOptions, Policy, SessionOptions
from trainer_client.forks import CALLS

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

CHILD_S = 20.0
"""Time that a child may take; one that hangs is killed and fails its test."""
CRASHED = "the child crashed"
QUICK = ClientOptions(timeout_s=20)
POLICY = Policy(batch_groups=1, max_queued_groups=8)


def in_child(work: Callable[[], object]) -> str:
    """Return what `work` returns or raises in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = str(work())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], CHILD_S)[0]:
            os.kill(pid, signal.SIGKILL)
            return "the child hangs"
        return os.read(reading, 1 << 16).decode() or CRASHED
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


def in_child_that_lives(work: Callable[[], object]) -> str:
    """Do as `in_child`, with the first child that gRPC does not crash, whatever it does, beside an asyncio client."""
    return next((told for told in (in_child(work) for _ in range(10)) if told != CRASHED), CRASHED)


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[BufferClient]:
    with BufferClient(service.address, QUICK) as made:
        yield made


@contextmanager
def busy(client: BufferClient, run_id: str) -> Iterator[list[int]]:
    """Two threads that are inside the client all the time: one waits for a batch, one asks; counts their answers."""
    over = threading.Event()
    answers = [0]
    failures: list[BaseException] = []

    def work(call: Callable[[], object]) -> None:
        try:
            while not over.is_set():
                call()
                answers[0] += 1
        except BaseException as error:  # noqa: BLE001 - raised again when the block ends
            failures.append(error)

    def pull() -> None:
        client.pull(run_id, term=1, step=0, timeout_s=60)
        over.wait(60)

    threads = [threading.Thread(target=work, args=(call,)) for call in (pull, lambda: client.run(run_id))]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        with Pusher(client.target, run_id) as pusher:
            pusher.push(arrays_for("late"))
        for thread in threads:
            thread.join(30)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)


def test_a_child_goes_on_with_the_client_that_it_inherits(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    with Pusher(client.target, run_id) as pusher:
        pusher.push(arrays_for("a"), arrays_for("b"))
    assert in_child(lambda: client.pull(run_id, term=1, step=0, timeout_s=10).groups[0].task_id) == "a"
    # The parent's connections are its own still, and the child's calls were real.
    assert client.run(run_id).next_step == 1
    assert client.pull(run_id, term=1, step=1, timeout_s=10).groups[0].task_id == "b"


def test_children_are_born_whole_while_other_threads_call_the_service(client: BufferClient, run_id: str) -> None:
    """Without the pause before a fork about every third child crashes here."""
    client.create_run(run_id, POLICY)
    with busy(client, run_id) as answers:
        for _ in range(12):
            assert in_child(lambda: client.run(run_id).term) == "1"
        before = answers[0]
        client.run(run_id)
        assert in_child(lambda: client.runs().count(run_id)) == "1"
    assert answers[0] > before


FIRST_PULL = """
import importlib.abc, os, signal, sys, threading
from trainer_client import BufferClient, ClientOptions

importing, forking = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "trainer_client.batch":
            importing.set()
            forking.wait(20)

address, run_id = sys.argv[1:]
assert "numpy" not in sys.modules
sys.meta_path.insert(0, Slow())
with BufferClient(address, ClientOptions(timeout_s=20)) as client:
    client.run(run_id)
    # Called before the client's own hook.
    os.register_at_fork(before=forking.set)

    def pulled():
        return client.pull(run_id, term=1, step=0, timeout_s=20).groups[0].task_id

    puller = threading.Thread(target=pulled)
    puller.start()
    assert importing.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        print(pulled(), flush=True)
        os._exit(0)
    puller.join()
    assert os.waitpid(child, 0)[1] == 0, "the child hangs"
    print(pulled())
"""
"""Forks while another thread is in the middle of what its first pull imports."""


def test_a_child_that_is_born_while_a_first_pull_imports_can_pull_too(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    with Pusher(client.target, run_id) as pusher:
        pusher.push(arrays_for("a"))
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FIRST_PULL, client.target, run_id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (0, "a\na\n"), done.stderr


def test_a_childs_child_and_a_child_that_closes_leave_the_others_connected(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)

    def grandchild() -> str:
        mine = client.run(run_id).term
        theirs = in_child(lambda: client.run(run_id).term)
        client.close()
        return f"{mine} {theirs}"

    assert in_child(grandchild) == "1 1"
    assert client.run(run_id).term == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_makes_a_client_of_its_own(
    service: ServiceProcess, client: BufferClient, run_id: str, method: str
) -> None:
    client.create_run(run_id, POLICY)
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=_term_of, args=(service.address, run_id, answers), daemon=True)
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        pytest.fail("the child hangs")
    assert process.exitcode == 0
    assert answers.get() == 1


def _term_of(address: str, run_id: str, answers: "multiprocessing.SimpleQueue[int]") -> None:
    with BufferClient(address, QUICK) as mine:
        answers.put(mine.run(run_id).term)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_session_is_refused_in_a_child(client: BufferClient, run_id: str, prefetch: int) -> None:
    client.create_run(run_id, POLICY)
    with Pusher(client.target, run_id) as pusher:
        pusher.push(*(arrays_for(f"t{i}") for i in range(3)))
    options = SessionOptions(pull_timeout_s=15)
    with client.session(run_id, prefetch=prefetch, options=options) as session:
        assert next(session).step == 0
        for use in (
            lambda: next(session),
            lambda: next(session.micro_batches()),
            session.publish,
            session.commit,
            session.checkpoint,
            session.state,
            lambda: session.took(1),
        ):
            told = in_child(use)
            assert told.startswith("UsedAfterFork: a session belongs to process"), told
            assert str(os.getpid()) in told
        assert in_child(session.close) == "None"
        assert next(session).step == 1
        session.publish()
    assert client.run(run_id).committed_steps == 2


def test_an_asyncio_client_is_refused_in_a_child_and_makes_it_unfit(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)

    async def story() -> tuple[str, str]:
        async with AsyncBufferClient(client.target, QUICK) as other:
            assert (await other.run(run_id)).term == 1

            def in_a_loop() -> object:
                asyncio._set_running_loop(None)
                loop = asyncio.new_event_loop()
                asyncio.set_event_loop(loop)
                return loop.run_until_complete(other.run(run_id))

            # A child is born within a running loop, which it has to forget.
            return (
                in_child_that_lives(in_a_loop),
                in_child_that_lives(lambda: client.run(run_id)),
            )

    told, blocking = asyncio.run(story())
    assert told.startswith("UsedAfterFork: an AsyncBufferClient belongs to process")
    assert blocking.startswith("UsedAfterFork")
    assert "AsyncBufferClient" in blocking
    assert "'spawn' or 'forkserver'" in blocking
    # Closed, it stands in no child's way.
    assert in_child(lambda: client.run(run_id).term) == "1"


def test_a_call_that_does_not_end_holds_a_fork_up_for_a_while_only(
    client: BufferClient, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_client.forks.LONGEST_HOLD_S", 0.1)
    client.create_run(run_id, POLICY)
    with CALLS.under_way():
        told = in_child(lambda: client.run(run_id))
    assert told.startswith("UsedAfterFork")
    assert "still inside a call after 0.1 s" in told
    assert client.run(run_id).term == 1


def test_a_waiting_pull_is_taken_up_again_after_a_fork(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    got: list[str] = []

    def pull() -> None:
        got.append(client.pull(run_id, term=1, step=0, timeout_s=60).groups[0].task_id)

    thread = threading.Thread(target=pull)
    thread.start()
    for _ in range(3):
        assert in_child(os.getppid) == str(os.getpid())
    with Pusher(client.target, run_id) as pusher:
        pusher.push(arrays_for("late"))
    thread.join(30)
    assert got == ["late"]


def test_a_new_term_taken_in_a_child_fences_the_parent(client: BufferClient, run_id: str) -> None:
    """A child is a trainer like any other."""
    client.create_run(run_id, POLICY)
    with client.session(run_id) as session:
        assert in_child(lambda: client.resume(run_id).term) == str(session.term + 1)
        with pytest.raises(StaleTerm):
            session.publish()


def test_where_fork_support_is_switched_off_the_child_says_so() -> None:
    """gRPC reads the variable once, so in a process of its own; without the refusal its child hangs."""
    program = (
        "import os\n"
        "from trainer_client import BufferClient\n"
        "client = BufferClient('127.0.0.1:9')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: client.runs()\n"
        "    except RuntimeError as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
    ).stdout
    assert "GRPC_ENABLE_FORK_SUPPORT=0 is set" in shown


def test_a_stream_that_waits_for_its_next_message_is_cancelled_for_a_fork(client: BufferClient, run_id: str) -> None:
    """Between two messages it may stay open; then nobody is inside gRPC."""
    client.create_run(run_id, POLICY)

    class Stream:
        def __init__(self) -> None:
            self.cancelled, self.waited_for = threading.Event(), threading.Event()
            self.first = True

        def __iter__(self) -> "Stream":
            return self

        def __next__(self) -> str:
            if self.first:
                self.first = False
                return "first"
            self.waited_for.set()
            assert self.cancelled.wait(30)
            raise StopIteration

        def cancel(self) -> None:
            self.cancelled.set()

    stream = Stream()
    messages = CALLS.messages(stream)
    assert next(messages) == "first"
    assert in_child(lambda: client.run(run_id).term) == "1"
    assert not stream.cancelled.is_set()
    thread = threading.Thread(target=lambda: list(messages))
    thread.start()
    assert stream.waited_for.wait(10)
    assert in_child(lambda: client.run(run_id).term) == "1"
    thread.join(10)
    assert stream.cancelled.is_set()
    assert not thread.is_alive()
