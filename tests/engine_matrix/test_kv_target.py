"""A worker's limit of samples in flight on a real server with a small KV cache: it grows, and falls when full."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_worker_engine import FIRST, until
from tests.engine_matrix.servers import sglang_servers
from tests.engine_matrix.verdict import check_account
from tests.engine_matrix.workers import worker
from tests.support.service import running_service
from tests.support.tiny_model import write_constant_model
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, Task

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOKENS, TARGET = 2_048, 0.8
"""Size of the cache, and the share of it that samples may take."""
LENGTHS = (40, 200, 120, 80)
FITTING = TARGET * TOKENS / (3 + sum(length**2 for length in LENGTHS) / sum(LENGTHS) / 2)
"""Samples whose mean context, E[L²]/2E[L] beside the prompt, fills it: 23."""


def tasks() -> Iterator[Task]:
    for i in itertools.count():
        sampling = SamplingParams(max_new_tokens=LENGTHS[i % len(LENGTHS)])
        yield Task(task_id=f"t{i:05d}", group_size=4, sampling=sampling, prompt_token_ids=[5, 6, 7 + i % 5])


def test_the_limit_follows_the_cache_of_a_real_server(tmp_path: Path) -> None:
    base = write_constant_model(tmp_path / "base", FIRST)
    with (
        running_service(tmp_path / "service") as service,
        sglang_servers(tmp_path, (base,), max_running_requests=64, max_total_tokens=TOKENS) as servers,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        # Nobody pulls: what is made is dropped, and more is always wanted.
        client.session("r", policy=Policy(batch_groups=2, max_queued_groups=2), tasks=tasks()),
    ):
        flags = ("--engine", servers.urls[0], "--groups-per-engine", "2", "--kv-target", str(TARGET))
        with worker(service.address, "r", tmp_path, *flags, worker_id="w") as running:

            def falls() -> list[dict[str, Any]]:
                return running.events("fewer samples")

            until(lambda: bool(falls()), "more samples than the cache holds", 60)
            first = falls()[0]
            assert first["was"] > max(FITTING, 8), "it has grown"
            assert first["kv_usage"] > TARGET or first["waiting"] > 0
            until(lambda: any(fall["most"] < first["most"] for fall in falls()), "fewer and fewer", 60)
            assert running.stop() == 0
            check_account(running.last_words())
