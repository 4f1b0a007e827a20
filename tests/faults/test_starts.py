"""Limits of starts while replicas and the store are killed: no window has more, by any observer's clock."""

import itertools
import threading
import time
from pathlib import Path

import pytest

from tests.support.push import Pusher
from tests.support.service import running_service
from trainer_client import BufferClient, ClientOptions, Environment, Policy, SamplingParams, Task

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

RATE, BURST, TASKS, KILLS = 240, 60, 120, 3
"""A burst takes 15 s to come again, longer than a restart: a store that forgets what has begun allows too much."""


def test_no_window_has_more_starts_than_the_limit_over_kills(tmp_path: Path) -> None:
    policy = Policy(batch_groups=TASKS, environments={"code": Environment(starts_per_minute=RATE, start_burst=BURST)})
    sampling = SamplingParams(max_new_tokens=8)
    tasks = [Task(group_size=1, environment="code", prompt_token_ids=[1], sampling=sampling) for _ in range(TASKS)]
    starts: list[tuple[float, float]] = []
    """Times of each lease: when it was asked for, and when it was there."""
    with (
        running_service(tmp_path, rpc_processes=2) as service,
        BufferClient(service.address, ClientOptions(timeout_s=30)) as client,
    ):
        client.create_run("r", policy)
        with client.session("r", tasks=tasks):
            done = threading.Event()

            def work(name: str) -> None:
                with Pusher(service.address, "r", name) as worker:
                    while not done.is_set():
                        asked = time.monotonic()
                        reply = worker.lease(4, wait_ms=500, timeout_s=60)
                        starts.extend([(asked, time.monotonic())] * len(reply.leases))
                        if len(starts) >= TASKS:
                            done.set()

            workers = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(4)]
            for each in workers:
                each.start()
            for kill in range(1, KILLS + 1):
                while len(starts) < kill * TASKS // (KILLS + 1):
                    assert not done.wait(0.02)
                service.kill()
                service.start()
            for each in workers:
                each.join(60)
            assert done.is_set()
    starts.sort(key=lambda one: one[1])
    for i, j in itertools.combinations(range(len(starts)), 2):
        span_s = starts[j][1] - min(asked for asked, _ in starts[i : j + 1])
        assert j - i + 1 <= BURST + span_s * RATE / 60 + 1e-6
