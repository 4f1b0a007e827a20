"""Threads of reward functions: how many, how long kept, and what becomes of calls that hang or come too late."""

import asyncio
import threading
from functools import partial

import pytest

from rollout_workers.rewarding.threads import RewardThreads
from tests.workers.building import eventually


def hang(until: threading.Event) -> None:
    until.wait(20)


async def test_a_thread_is_kept_for_the_next_call() -> None:
    threads, seen = RewardThreads(4), list[int]()
    for _ in range(3):
        await threads.run(lambda: seen.append(threading.get_ident()))
        await eventually(lambda: threads._idle._value == 1)
    threads.close()
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen


async def test_calls_wait_while_all_threads_are_taken() -> None:
    threads, release, made = RewardThreads(2), threading.Event(), list[str]()
    hanging = [asyncio.create_task(threads.run(partial(hang, release))) for _ in range(2)]
    later = asyncio.create_task(threads.run(lambda: made.append("later")))
    await eventually(lambda: threads._started == 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(later), 0.05)
    assert made == []
    release.set()
    await asyncio.wait_for(asyncio.gather(*hanging, later), 10)
    assert made == ["later"]
    threads.close()


async def test_what_a_call_raises_is_raised_to_its_caller_and_the_thread_goes_on() -> None:
    threads, made = RewardThreads(1), list[str]()

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        await threads.run(broken)
    await threads.run(lambda: made.append("after"))
    assert made == ["after"]
    threads.close()


async def test_after_the_end_calls_that_wait_are_not_made_and_threads_are_gone() -> None:
    before = set(threading.enumerate())
    threads, release, made = RewardThreads(1), threading.Event(), list[str]()
    hanging = asyncio.create_task(threads.run(partial(hang, release)))
    later = asyncio.create_task(threads.run(lambda: made.append("later")))
    await eventually(lambda: threads._started == 1)
    [thread] = [one for one in threading.enumerate() if one not in before and one.name.startswith("reward_")]
    later.cancel()
    threads.close()
    release.set()
    await asyncio.wait_for(hanging, 10)
    await eventually(lambda: not thread.is_alive())
    assert made == []
