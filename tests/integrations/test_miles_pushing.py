"""Tests of how Miles' data buffer gets its groups to the service: lost replies, a full queue, a service
that is away.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from buffer_wire.status import ServiceUnreachable
from examples.miles.stand_in import arguments
from tests.integrations.miles_contract import installed
from tests.integrations.test_miles_data_buffer import Buffer, assert_same, finished
from tests.support.service import ServiceProcess

HOUR_S = 3600


class LossyPush:
    """The way of a buffer's pushes; the replies to the next `lost` of them do not arrive."""

    def __init__(self, buffer: Any) -> None:
        self.lost = 0
        self.calls: list[Any] = []
        self.timeouts: list[float] = []
        self._push = buffer._pusher._push
        buffer._pusher._push = self

    def __call__(self, requests: Iterator[bytes], *, timeout: float) -> Any:
        call = self._push(requests, timeout=timeout)
        self.calls.append(call)
        self.timeouts.append(timeout)
        if self.lost:
            self.lost -= 1
            next(iter(call))
            raise ServiceUnreachable("UNAVAILABLE: connection reset", status="UNAVAILABLE")
        return call


@pytest.fixture
def buffer(service: ServiceProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    with installed("miles"):
        made: Any = Buffer(
            arguments(
                rollout_batch_size=1,
                n_samples_per_prompt=2,
                max_weight_staleness=1,
                rollout_buffer_address=service.address,
                rollout_buffer_run=request.node.name[:60],
                rollout_buffer_timeout_s=30,
            )
        )
        yield made
        asyncio.run(made.aclose())


async def test_group_whose_reply_was_lost_is_queued_and_given_back_when_it_is_dropped(buffer: Any) -> None:
    line = LossyPush(buffer)
    line.lost = 1
    old, new = finished(0, "1"), finished(1, "4")
    await buffer.put(old)
    assert len(line.calls) == 2
    await buffer.put(new)
    assert_same(await buffer.get(current_version=4), new)
    assert buffer.unused == [old.prompt_group]
    # A group that was there before its first attempt is nothing that this process has to give back.
    await buffer.put(new)
    again = finished(0, "4")
    await buffer.put(again)
    assert_same(await buffer.get(current_version=4), again)
    assert buffer.unused == [old.prompt_group]


async def test_group_that_waits_for_room_is_sent_once_and_can_be_withdrawn(
    buffer: Any, service: ServiceProcess
) -> None:
    line = LossyPush(buffer)
    put = [finished(i) for i in range(3)]
    for group in put[:2]:
        await buffer.put(group)
    third = asyncio.create_task(buffer.put(put[2]))
    async with asyncio.timeout(20):
        while not service.metric("rollout_buffer_blocked_pushes"):
            assert not third.done()
            await asyncio.sleep(0.02)
    assert len(line.calls) == 3
    assert min(line.timeouts) > HOUR_S, "an upload and a wait for room take as long as they take"
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    ended = threading.Event()
    if line.calls[2].add_callback(ended.set):
        assert await asyncio.to_thread(ended.wait, 20)
    assert len(line.calls) == 3


async def test_wait_on_a_service_that_does_not_answer_is_logged(
    buffer: Any, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_client.waiting.FIRST_LOG_S", 0.0)
    caplog.set_level(logging.INFO, "trainer_client")
    line = LossyPush(buffer)
    line.lost = 1
    started = time.monotonic()
    await buffer.put(finished(0))
    assert time.monotonic() - started < 30
    said = [record.getMessage() for record in caplog.records if record.name == "trainer_client"]
    assert said == [f"pushing group 'miles-0.0': waiting for 0 s on the service at {service.address}"]
