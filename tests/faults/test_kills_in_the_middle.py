"""Kill -9 of worker, service and trainer while columns, images, agents' requests, patches and adapters are under way.

Engines are simulated, and make the columns that tasks ask for; agents talk HTTP to the worker. Everything else is real.
"""

import asyncio
import itertools
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buffer_wire.weights.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from examples.agents.model import VOCAB_SIZE, save_tokenizer
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.hosts import own_hosts
from rollout_workers.options import AgentOptions
from rollout_workers.worker import Worker
from tests.faults.dying import MODEL, RUN, Journal, model
from tests.faults.kinds_of_work import BATCH_GROUPS, KINDS, KINDS_OF_WEIGHTS, POLICY, STEPS, check_game
from tests.support.service import running_service
from tests.workers.building import eventually, options
from tests.workers.fetched import left_over
from tests.workers.process import worker_process
from tests.workers.training import OPTIONS, until
from tests.workers.working import assert_every_token_has_an_end
from trainer_client import BufferClient, ClientOptions

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


class Trainer:
    """Trainer that is started again whenever it dies, in a thread."""

    def __init__(self, address: str, folder: Path, kind: str) -> None:
        self._command = [sys.executable, "-m", "tests.faults.dying", "trainer", address, str(folder), kind]
        self._log = folder / "trainer.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_wanted = True
        self._may_start = threading.Event()
        self._may_start.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._is_wanted and (self._process is None or self._process.returncode == -signal.SIGKILL):
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
            self._process.wait()
            self._may_start.wait()

    @contextmanager
    def staying_dead(self) -> Iterator[None]:
        """Let it not start again meanwhile."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def end(self) -> None:
        """Wait for the end of its work."""
        self._thread.join(120)
        assert self._process is not None
        assert self._process.returncode == 0, self._log.read_text()

    def close(self) -> None:
        """End it, whatever it does."""
        self._is_wanted = False
        self._may_start.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()


@contextmanager
def training(address: str, folder: Path, kind: str) -> Iterator[Trainer]:
    trainer = Trainer(address, folder, kind)
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_whole_and_trained_once(kind: str, tmp_path: Path, tokenizer: Path) -> None:
    journal, published, fetched = Journal(tmp_path / "journal"), tmp_path / "published", tmp_path / "weights" / RUN
    flags = [*KINDS[kind].flags, "--tokenizer", str(tokenizer), "--vocab-size", str(VOCAB_SIZE)]
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        training(service.address, tmp_path, kind) as trainer,
    ):

        def under_way() -> None:
            # The trainer goes a step further and no more, so that there is work for the next kill on any machine.
            done = journal.of("step")
            journal.write(end=done[-1][0] + 2)
            until(
                lambda: len(journal.of("step")) > len(done) and client.ledger(RUN).tasks.leased > 0, "a step, and work"
            )

        until(lambda: RUN in client.runs(), "the trainer has made the run")
        dying = [sys.executable, "-m", "tests.faults.dying", "worker"]
        with worker_process(service.address, RUN, tmp_path, *flags, program=dying) as first:
            assert first.process.wait(90) == -signal.SIGKILL
            journal.write(end=journal.of("step")[-1][0] + 1)
        assert left_over(fetched), "it died with half of a file"
        with worker_process(service.address, RUN, tmp_path, *flags) as second:
            under_way()
            second.kill()
        with worker_process(service.address, RUN, tmp_path, *flags) as third:
            for _ in range(2):
                under_way()
                service.kill()
                service.start()
            assert third.stop() == 0
        journal.write(end=STEPS)
        with worker_process(service.address, RUN, tmp_path, *flags) as fourth:
            trainer.end()
            assert fourth.stop() == 0
        state = client.run(RUN)

    assert journal.of("death") == list(KINDS[kind].deaths)
    steps_of: dict[int, dict[str, str]] = {}
    for step, groups in journal.of("step"):
        assert steps_of.setdefault(step, groups) == groups, "a step that comes again is what it was"
    assert sorted(steps_of) == list(range(STEPS))
    trained = Counter(itertools.chain.from_iterable(steps_of.values()))
    assert sorted(trained) == sorted(task.task_id for task in KINDS[kind].tasks())
    assert trained.total() == STEPS * BATCH_GROUPS
    assert state.ledger.balanced
    assert state.ledger.groups.trained.groups == STEPS * BATCH_GROUPS
    assert (state.ledger.tasks.completed, state.ledger.tasks.failed) == (STEPS * BATCH_GROUPS, 0)
    # Nothing half is left, and what is there is what was published.
    assert left_over(fetched) == []
    for place in (*published.glob("v*/"), *(path for path in fetched.iterdir() if (path / MODEL).exists())):
        version = int(place.name.removeprefix("v").split("-")[0].rpartition(".")[2])
        assert (place / MODEL).read_bytes() == model(version)
    assert "were made of earlier versions" in fourth.said()


def assert_whole(adapter: Path, version: int) -> None:
    assert (adapter / ADAPTER_WEIGHTS).read_bytes() == model(version)
    assert "LORA" in (adapter / ADAPTER_CONFIG).read_text()


def test_half_an_adapter_is_served_to_nobody_and_the_one_before_stays_usable(tmp_path: Path) -> None:
    journal, published, fetched = Journal(tmp_path / "journal"), tmp_path / "published", tmp_path / "weights" / RUN
    kind = KINDS_OF_WEIGHTS["adapters"]
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        training(service.address, tmp_path, "adapters") as trainer,
    ):

        def is_taken() -> bool:
            state = client.run(RUN)
            return any(engine.engine_id == "w.e0" and engine.loaded == state.published for engine in state.engines)

        def check_what_is_served() -> None:
            """Simulated engines read no files: what lies where the last published adapter was loaded from is whole."""
            told = client.run(RUN).published
            for place in fetched.glob(f"{told.term}.{told.version}-*"):
                assert_whole(place, told.version)

        def publish_until_death(number: int) -> None:
            """Let the trainer publish one adapter after the other, each when the one before is taken."""
            while len(journal.of("death")) < number:
                until(is_taken, "the worker serves what is published")
                check_what_is_served()
                done = client.run(RUN).published.version
                journal.write(end=done + 1)
                until(
                    lambda done=done: len(journal.of("death")) == number or client.run(RUN).published.version > done,  # type: ignore[misc]
                    "the next adapter is published, or the trainer dies before",
                )

        def serve_the_one_before() -> None:
            """A new worker takes it from its disk, for nobody serves anything now."""
            before = client.run(RUN)
            loaded = f"version={before.published.term}.{before.published.version}"
            granted = before.statistics["leases_granted"]
            with worker_process(service.address, RUN, tmp_path, *kind.flags, worker_id="w2") as another:
                until(lambda: "adapter loaded" in another.said() and loaded in another.said(), loaded)
                until(lambda: client.run(RUN).statistics["leases_granted"] > granted, "it generates with it")
                check_what_is_served()
                assert another.stop() == 0

        until(lambda: RUN in client.runs(), "the trainer has made the run")
        journal.write(end=1)
        dying = [sys.executable, "-m", "tests.faults.dying", "worker"]
        with worker_process(service.address, RUN, tmp_path, *kind.flags, program=dying) as worker:
            assert worker.process.wait(90) == -signal.SIGKILL
        assert left_over(fetched), "it died with half of an adapter"

        term = 0
        for number, _ in enumerate(kind.deaths, 1):
            until(lambda term=term: client.run(RUN).term > term, "the trainer lives")  # type: ignore[misc]
            with worker_process(service.address, RUN, tmp_path, *kind.flags) as worker, trainer.staying_dead():
                publish_until_death(number)
                assert is_taken(), "what nobody was told of is with nobody"
                worker.kill()
                term = client.run(RUN).term
                serve_the_one_before()
                journal.write(end=max(journal.of("checkpoint"), default=0))
        journal.write(end=STEPS)
        with worker_process(service.address, RUN, tmp_path, *kind.flags) as worker:
            trainer.end()
            assert worker.stop() == 0
        state = client.run(RUN)

    assert journal.of("death") == list(kind.deaths)
    assert state.ledger.balanced
    assert state.ledger.groups.trained.groups == kind.steps * BATCH_GROUPS
    assert state.ledger.tasks.failed == 0
    assert left_over(fetched) == []
    others = {path.name for path in published.iterdir() if not path.name.startswith("v")}
    assert others == {".port"}, "nothing that was begun is left"
    places = [*published.glob("v*/"), *(path for path in fetched.iterdir() if (path / ADAPTER_CONFIG).exists())]
    assert len(places) > 2
    for place in places:
        version = int(place.name.removeprefix("v").split("-")[0].rpartition(".")[2])
        assert_whole(place, version)


async def test_engines_that_are_lost_in_agents_requests_cost_no_token_and_double_no_game(
    tmp_path: Path, tokenizer: Path
) -> None:
    tasks = list(itertools.islice(KINDS["agents"].tasks(), 4 * BATCH_GROUPS))
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        client.session(RUN, policy=POLICY, tasks=tasks, options=OPTIONS) as session,
    ):
        made = options(
            service.address,
            tmp_path,
            simulated=SimulatedOptions(engines=2, tokens_per_s=60.0, vocab_size=VOCAB_SIZE),
            reward="",
            agent=AgentOptions("tests.faults.kinds_of_work:play"),
            tokenizer=str(tokenizer),
        )
        hosts = own_hosts(made)
        worker = Worker(made, hosts=hosts)
        running = asyncio.create_task(worker.run())
        for host in hosts:
            # Each request of an agent is a call of the engine; some games are in their second turn by then.
            await eventually(lambda engine=host.engine: len(engine._decoding) > 1 and engine.answered.total() > 4)  # type: ignore[misc]
            await host.engine.die()
            await eventually(lambda engine=host.engine: not engine._decoding)  # type: ignore[misc]
            await host.engine.revive()
        batches = [await asyncio.to_thread(next, session) for _ in range(4)]
        worker.stop()
        await asyncio.wait_for(running, 30)
        state = session.state()
    for sample in (sample for batch in batches for sample in batch.samples):
        check_game(sample)
    assert sorted(group.task_id for batch in batches for group in batch.groups) == [task.task_id for task in tasks]
    assert state.ledger.balanced
    assert (state.ledger.tasks.completed, state.ledger.tasks.failed) == (len(tasks), 0)
    assert state.ledger.groups.accepted.groups == len(tasks)
    assert worker.counters.tokens_resumed > 0
    assert worker.counters.tokens_discarded == {}
    assert_every_token_has_an_end(worker.counters)
