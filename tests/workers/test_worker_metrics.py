"""A worker's own metrics: what Prometheus reads agrees with what the worker counts."""

from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from buffer_wire.errors import InvalidField
from tests.workers.building import eventually, options, task
from tests.workers.fake_service import FakeService
from tests.workers.working import working

_PREFIX = "rollout_buffer_worker_"


class _Scraped:
    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples that have these labels, of training where they name no other work."""
        named = {"run": "r", "work": "training", **labels}
        found = [
            sample.value
            for sample in self.samples
            if sample.name == _PREFIX + name
            and all(sample.labels.get(label, value) == value for label, value in named.items())
        ]
        assert found, name
        return sum(found)


async def _get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def _scrape(url: str) -> _Scraped:
    status, text = await _get(url)
    assert status == 200
    return _Scraped(text)


async def test_metrics_say_what_became_of_every_token(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{number}") for number in range(3)))
    async with working(fake, tmp_path, metrics_listen="127.0.0.1:0") as running:
        await eventually(lambda: running.worker.counters.pushed["queued"] == 3)
        scraped = await _scrape(running.worker.metrics_url)
        counters, (slot,) = running.worker.counters, running.worker.slots
        assert scraped.value("pushed_groups_total", answer="queued") == scraped.value("leases_total") == 3
        assert scraped.value("tokens_total") == scraped.value("pushed_tokens_total") == counters.tokens > 0
        assert scraped.value("rewarded_groups_total") == 3
        assert scraped.value("reward_seconds_total") == pytest.approx(counters.reward_s)
        assert scraped.value("leases_total", work="evaluation") == 0
        bundles = scraped.value("bundle_bytes_bucket", le="+Inf")
        assert 1 <= bundles == scraped.value("bundle_bytes_count") <= 3
        assert scraped.value("bundle_bytes_sum") >= counters.pushed_bytes["relayed"] > 0
        assert scraped.value("engine_decoded_tokens_total", engine=slot.engine_id) == counters.tokens
        assert scraped.value("engine_state", engine=slot.engine_id, state="ready") == 1
        assert scraped.value("engine_state", engine=slot.engine_id) == 1


async def test_metrics_of_engines_are_passed_on(fake: FakeService, tmp_path: Path) -> None:
    async def own(_: web.Request) -> web.Response:
        return web.Response(text="sglang:num_running_reqs 3.0\n")

    application = web.Application()
    application.router.add_get("/metrics", own)
    engine = TestServer(application)
    await engine.start_server()
    async with working(fake, tmp_path, metrics_listen="127.0.0.1:0") as running:
        await eventually(lambda: running.worker.metrics_url != "")
        (slot,) = running.worker.slots
        url = running.worker.metrics_url.replace("/metrics", "/engines/0/metrics")
        assert (await _get(url))[0] == 404  # A simulated engine is no server.
        slot.info = replace(slot.info, address=str(engine.make_url("/")))
        assert await _get(url) == (200, "sglang:num_running_reqs 3.0\n")
        assert (await _get(url.replace("/0/", "/1/")))[0] == 404
        await engine.close()
        status, said = await _get(url)
        assert (status, slot.info.address.rstrip("/") in said) == (502, True)


async def test_worker_serves_no_metrics_unasked(fake: FakeService, tmp_path: Path) -> None:
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: bool(fake.lease_requests))
        assert running.worker.metrics_url == ""


def test_address_of_metrics_is_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="metrics_listen is '9100'; it must be host:port"):
        options("127.0.0.1:1", tmp_path, metrics_listen="9100")
