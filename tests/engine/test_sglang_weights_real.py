"""Every way of new weights into a real SGLang server, under every pause mode, and what failed broadcasts leave behind.

The trainer's side of a process group is built here from torch alone.
"""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineLoadFailed, EngineTimeout
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher, free_port
from rollout_workers.engine.types import (
    GeneratedSample,
    PauseMode,
    PrefixCache,
    ProcessGroup,
    SampleRequest,
    TensorSpec,
)
from tests.engine.conftest import CONSTANT_TOKENS, Models
from trainer_client.publish.collective.buckets import bucket_counts, packed
from trainer_client.publish.named_tensors import specs_of

# The first of these to run starts the server.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = np.array([40, 41, 42], dtype=np.int32)
_names = iter(f"group-{i}" for i in range(100))


class Sender:
    """Rank 0 of a group of two."""

    def __init__(self, *, world_size: int = 2) -> None:
        import torch.distributed as dist

        self.name = next(_names)
        self.port = free_port()
        self.world_size = world_size
        self._limit = dt.timedelta(seconds=20)
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", self.port, world_size, is_master=True, wait_for_workers=False, timeout=self._limit
        )
        self._group: Any = None

    @property
    def process_group(self) -> ProcessGroup:
        return ProcessGroup(
            group_name=self.name,
            backend="gloo",
            master_address="127.0.0.1",
            master_port=self.port,
            rank=1,
            world_size=self.world_size,
        )

    def open(self) -> None:
        from torch.distributed import distributed_c10d as c10d

        self._group, _ = c10d._new_process_group_helper(
            self.world_size,
            0,
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(self.name, self._store),
            group_name=self.name,  # type: ignore[arg-type]
            timeout=self._limit,
            backend_options=None,
            device_id=None,
        )
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(self.world_size)}

    def send(self, tensors: Iterable[Any]) -> None:
        import torch.distributed as dist

        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        """The connections are closed when nothing refers to the group any more."""
        import torch.distributed as dist

        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._store = None


@contextmanager
def sending(**how: Any) -> Iterator[Sender]:
    sender = Sender(**how)
    try:
        yield sender
    finally:
        sender.close()


def tensors_of(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


def specs(tensors: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]


def counts_of(tensors: dict[str, Any]) -> tuple[int, ...]:
    """The tensors of each bucket of 100 KB, of some 400 KB in all."""
    counts = bucket_counts(specs_of(tensors.items)[0], 100_000)
    assert 2 < len(counts) < len(tensors)
    return counts


async def join(engine: SglangEngine, sender: Sender) -> None:
    await asyncio.gather(asyncio.to_thread(sender.open), engine.join_group(sender.process_group, deadline_s=20))


async def broadcast(engine: SglangEngine, sender: Sender, model: Path, label: str, *, bucketed: bool) -> None:
    tensors = tensors_of(model)
    await engine.check_tensors(specs(tensors))
    counts = counts_of(tensors) if bucketed else ()
    sent = packed(iter(tensors.values()), counts) if bucketed else tensors.values()
    receiving = engine.receive(
        specs(tensors), buckets=counts, group_name=sender.name, version_label=label, deadline_s=20
    )
    await asyncio.gather(asyncio.to_thread(sender.send, sent), receiving)


async def tokens(engine: SglangEngine) -> set[tuple[int, str]]:
    samples = await engine.generate([SampleRequest(sample_index=0, input_ids=PROMPT, max_new_tokens=3)], deadline_s=30)
    return {
        (int(t), span.version_label) for s in samples for span in s.spans for t in s.output_ids[span.start : span.end]
    }


@pytest_asyncio.fixture
async def member(engine: SglangEngine) -> AsyncIterator[tuple[SglangEngine, Sender]]:
    with sending() as sender:
        await join(engine, sender)
        yield engine, sender
        sender.close()
        await engine.leave_group(sender.name)


@pytest.mark.parametrize("mode", PauseMode)
async def test_all_ways_leave_the_same_weights(
    member: tuple[SglangEngine, Sender], models: Models, mode: PauseMode
) -> None:
    engine, sender = member
    ways: dict[str, Callable[[Path, str], Any]] = {
        "files": engine.load_files,
        "tensors": engine.load_tensors,
        "broadcast": lambda path, label: broadcast(engine, sender, path, label, bucketed=False),
        "buckets": lambda path, label: broadcast(engine, sender, path, label, bucketed=True),
    }
    left = {}
    for i, (way, load) in enumerate(ways.items()):
        token = i % len(CONSTANT_TOKENS)
        busy = asyncio.create_task(
            engine.generate([SampleRequest(sample_index=0, input_ids=PROMPT, max_new_tokens=1500, ignore_eos=True)])
        )
        async with asyncio.timeout(20):
            while (await engine.load()).running != 1:  # noqa: ASYNC110 -- the server can only be asked
                await asyncio.sleep(0.02)
        for j, model in enumerate((models.constant[token], models.random[1])):
            await engine.pause(mode)
            await load(model, f"{i + 1}.{j}")
            await engine.resume()
            if j == 0:
                assert await tokens(engine) == {(CONSTANT_TOKENS[token], f"{i + 1}.0")}
        left[way] = await engine.checksums()
        (sample,) = await busy
        assert (sample.finish_reason == "abort") == (mode is PauseMode.ABORT)
    assert len(left["files"]) > 10
    assert all(way == left["files"] for way in left.values())


async def test_sender_that_goes_away_leaves_the_old_weights(
    member: tuple[SglangEngine, Sender], models: Models
) -> None:
    engine, sender = member
    await engine.pause(PauseMode.RETRACT)
    await engine.load_files(models.constant[0], "3.0")
    tensors = tensors_of(models.constant[1])
    receiving = asyncio.create_task(
        engine.receive(specs(tensors), group_name=sender.name, version_label="3.1", deadline_s=20)
    )
    # Half of it has arrived for sure when the rest is asked for.
    first_half = dict(list(tensors.items())[: len(tensors) // 2])
    await asyncio.to_thread(sender.send, first_half.values())
    sender.close()
    with pytest.raises(EngineLoadFailed, match="Failed to receive weights") as failed:
        await receiving
    assert failed.value.weights == "kept"
    await engine.leave_group(sender.name)
    await engine.resume()
    assert await tokens(engine) == {(CONSTANT_TOKENS[0], "3.0")}


async def test_sender_that_goes_away_between_buckets_leaves_a_mixture_until_the_next_load(
    member: tuple[SglangEngine, Sender], models: Models
) -> None:
    engine, sender = member
    await engine.pause(PauseMode.RETRACT)
    await engine.load_files(models.constant[0], "3.2")
    tensors = tensors_of(models.constant[1])
    counts = counts_of(tensors)
    receiving = asyncio.create_task(
        engine.receive(specs(tensors), buckets=counts, group_name=sender.name, version_label="3.3", deadline_s=20)
    )
    # What was sent has arrived for sure when the part of the next bucket is asked for.
    first, second, *_ = packed(iter(tensors.values()), counts)
    await asyncio.to_thread(sender.send, [first, second])
    sender.close()
    with pytest.raises(EngineLoadFailed, match="Failed to receive weights") as failed:
        await receiving
    assert failed.value.weights == "unknown"
    await engine.leave_group(sender.name)
    await engine.load_files(models.constant[2], "3.4")
    await engine.resume()
    assert await tokens(engine) == {(CONSTANT_TOKENS[2], "3.4")}


async def test_engine_that_is_stuck_in_a_broadcast_is_free_when_the_sender_closes(
    member: tuple[SglangEngine, Sender], models: Models
) -> None:
    engine, sender = member
    await engine.pause(PauseMode.RETRACT)
    tensors = specs(tensors_of(models.constant[1]))
    with pytest.raises(EngineTimeout):
        await engine.receive(tensors, group_name=sender.name, version_label="4.1", deadline_s=0.5)
    leaving = asyncio.create_task(engine.leave_group(sender.name))
    assert not (await asyncio.wait({leaving}, timeout=0.5))[0]
    sender.close()
    await leaving
    await engine.load_files(models.constant[2], "4.2")
    await engine.resume()
    assert await tokens(engine) == {(CONSTANT_TOKENS[2], "4.2")}


async def test_group_whose_other_members_never_come_ends_with_its_meeting_point(engine: SglangEngine) -> None:
    with sending(world_size=3) as sender:
        joining = asyncio.create_task(engine.join_group(sender.process_group, deadline_s=20))
        assert not (await asyncio.wait({joining}, timeout=1.0))[0]
        sender.close()
        with pytest.raises(EngineLoadFailed, match="Failed to initialize") as failed:
            await joining
        assert failed.value.weights == "kept"
    assert await tokens(engine)


async def test_group_can_be_joined_again_under_the_same_name(engine: SglangEngine, models: Models) -> None:
    with sending() as first:
        await join(engine, first)
        with sending() as second:
            second.name = first.name
            # As a worker that was started anew would: it knows nothing of the first one.
            first.close()
            await join(engine, second)
            await engine.pause(PauseMode.RETRACT)
            await broadcast(engine, second, models.constant[1], "5.1", bucketed=False)
            await engine.resume()
            assert await tokens(engine) == {(CONSTANT_TOKENS[1], "5.1")}
            second.close()
            await engine.leave_group(second.name)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_what_a_group_has_cached_survives_an_update_for_that_group_and_for_no_new_one(
    launcher: SglangLauncher, models: Models, mode: PauseMode
) -> None:
    cached = {
        kept: await _cached_after_an_update(launcher.base_url, models, mode, kept, f"1.{40 + 2 * i}", f"1.{41 + 2 * i}")
        for i, kept in enumerate(PrefixCache)
    }
    # What goes on has computed its whole context anew, which the new one then shares.
    assert cached[PrefixCache.VERSION] == {"goes on": 0, "new": len(LONG) - 1, "new again": len(LONG) - 1}
    # All but the token that was drawn last, whose keys nobody has computed.
    assert cached[PrefixCache.GROUP] == {"goes on": len(LONG) + 7, "new": 0, "new again": len(LONG) - 1}


LONG = np.arange(20, 84, dtype=np.int32)


async def _cached_after_an_update(
    url: str, models: Models, mode: PauseMode, kept: PrefixCache, before: str, after: str
) -> dict[str, int]:
    """Input tokens that the server took from its prefix cache under the second version."""
    engine = SglangEngine(url, options=ServerOptions(generate_timeout_s=100, prefix_cache=kept))

    async def asked(ids: np.ndarray[Any, np.dtype[np.int32]], begun_with: str = "") -> GeneratedSample:
        request = SampleRequest(sample_index=0, input_ids=ids, max_new_tokens=8, ignore_eos=True, begun_with=begun_with)
        (sample,) = await engine.generate([request])
        return sample

    try:
        await _update(engine, models.random[0], before, mode)
        first = await asked(LONG)
        assert first.spans[0].version_label == before
        await _update(engine, models.random[1], after, mode)
        going_on = await asked(np.concatenate([LONG, first.output_ids]), begun_with=before)
        assert {span.version_label for span in going_on.spans} == {after}
        new, again = await asked(LONG), await asked(LONG)
    finally:
        await engine.close()
    return {"goes on": going_on.cached_tokens, "new": new.cached_tokens, "new again": again.cached_tokens}


async def _update(engine: SglangEngine, model: Path, label: str, mode: PauseMode) -> None:
    await engine.pause(mode)
    await engine.load_files(model, label)
    await engine.resume()
