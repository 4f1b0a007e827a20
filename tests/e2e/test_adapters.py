"""Adapters from the trainer to the tokens, with a real service and a worker of its own process that is killed.

The engine is a stub that speaks SGLang's wire format. It answers with tokens that say which adapter they were made
under: FIRST + version, and FIRST without one.
"""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.e2e.test_worker_engine import until
from tests.engine.fake_sglang import FakeSglang, answer, asks_vocabulary, ok
from tests.support.adapters import write_adapter
from tests.support.service import running_service
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch
from trainer_client.publish import AdapterPublisher, FilesPublisher

FIRST = 10
TOKENS = 3
MOST = 2
LAYER = "model.layers.0.self_attn.q_proj"


class Stub(FakeSglang):
    """Server whose loads of one version are held up. It stays up when its worker is killed, as a server does."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.most_adapters, self.incremental = "default", MOST, True
        self.handlers["/generate"] = self._say_adapter
        self.handlers["/load_lora_adapter"] = self._load_slowly
        self.slow = ""
        self.loading = threading.Event()
        self.go_on = threading.Event()
        self.most_held = 0

    async def _say_adapter(self, body: Any) -> web.StreamResponse:
        if body.get("token_ids_logprob"):
            return await asks_vocabulary(body)
        names = body.get("lora_path") or [".0"] * len(body["rid"])
        made = [[FIRST + int(name.partition(".")[2])] * TOKENS for name in names]
        spans = [{"version": self.version, "start": 0, "end": TOKENS}]
        return ok([answer(rid, ids, weight_versions=spans) for rid, ids in zip(body["rid"], made, strict=True)])

    async def _load_slowly(self, body: Any) -> web.StreamResponse:
        if self.slow and body["lora_name"].endswith(self.slow):
            self.loading.set()
            await asyncio.to_thread(self.go_on.wait, 30)
        reply = await self._load_adapter(body)
        self.most_held = max(self.most_held, len(self.adapters))
        return reply


@contextmanager
def serving() -> Iterator[Stub]:
    """A stub in a thread of its own."""
    stub, up, down = Stub(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with stub:
            up.set()
            await down.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    assert up.wait(10)
    try:
        yield stub
    finally:
        stub.go_on.set()
        loop.call_soon_threadsafe(down.set)
        thread.join(10)
        loop.close()


def endless() -> Iterator[Task]:
    for i in itertools.count():
        sampling = SamplingParams(max_new_tokens=TOKENS)
        yield Task(task_id=f"t{i:05d}", group_size=2, sampling=sampling, prompt_token_ids=[5, 6, 7])


def check(batch: Batch) -> None:
    for sample in batch.samples:
        ((span),) = sample.spans
        made_by = {int(token) - FIRST for token in sample.token_ids[span.start : span.end]}
        assert made_by == {span.version.version}


def adapter(version: int) -> Any:
    def save(directory: Path) -> None:
        directory.rmdir()
        write_adapter(directory, LAYER, seed=version)

    return save


def test_worker_is_killed_while_an_adapter_loads_and_the_engine_is_started_anew(tmp_path: Path) -> None:
    policy = Policy(batch_groups=2, max_queued_groups=4, max_staleness=2, max_attempts=20, retry_backoff_ms=100)
    options = SessionOptions(pull_timeout_s=60)
    with (
        serving() as stub,
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=30)) as client,
        AdapterPublisher(FilesPublisher(tmp_path / "published", serve="http")) as publisher,
        client.session("r", policy=policy, tasks=endless(), publisher=publisher, options=options) as session,
    ):
        flags = ("--engine", stub.url, "--groups-per-engine", "2", "--lease-wait-s", "1")
        with worker_process(service.address, "r", tmp_path, *flags) as worker:
            for batch in itertools.islice(session, 3):
                check(batch)
                session.publish(adapter(session.version + 1), wait_for=1, timeout_s=20)
            assert "/pause_generation" not in stub.order
            stub.slow = f".{session.version + 1}"
            session.publish(adapter(session.version + 1))
            assert stub.loading.wait(20)
            worker.kill()
        # The server has finished what nobody waits for any more.
        stub.go_on.set()
        until(lambda: any(name.endswith(stub.slow) for name in stub.adapters), "the load is done", 10)
        stub.slow = ""
        with worker_process(service.address, "r", tmp_path, *flags) as worker:
            for batch in itertools.islice(session, 3):
                check(batch)
                session.publish(adapter(session.version + 1), wait_for=1, timeout_s=20)
            stub.start_anew()
            for batch in itertools.islice(session, 3):
                check(batch)
                session.publish(adapter(session.version + 1), wait_for=1, timeout_s=20)
            assert stub.most_held <= MOST
            assert worker.stop() == 0
        state = client.run("r")
    assert state.ledger.balanced
    assert state.statistics["staleness_max"] <= 2
    assert "adapter loaded" in worker.said()
