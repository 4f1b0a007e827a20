"""SglangEngine's weights against FakeSglang: sessions, and what is left behind when one of them fails."""

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineLoadFailed, EngineTimeout
from rollout_workers.engine.sglang import weights as sglang_weights
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import PauseMode, TensorSpec
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.weights.swap import swap
from tests.engine.against_fake import connected
from tests.engine.fake_sglang import FakeSglang, never_answer, ok, refused
from tests.support.flattened import tensors_in
from tests.support.tiny_model import TinyModelShape, write_random_model

NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."
QUICK = ServerOptions(control_timeout_s=1, load_timeout_s=1, reconnect_s=0.5)
TENSORS = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", ()))
TENSOR, DISTRIBUTED = "/update_weights_from_tensor", "/update_weights_from_distributed"
BEGIN, END = "/begin_weight_update", "/end_weight_update"


@pytest_asyncio.fixture
async def engine(fake: FakeSglang) -> AsyncIterator[SglangEngine]:
    async with connected(fake, QUICK) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "m")


def updates(fake: FakeSglang) -> list[str]:
    return [path for path in fake.order if "weight" in path and "model_info" not in path]


async def receive(engine: SglangEngine, *, buckets: tuple[int, ...] = (), deadline_s: float = 5) -> None:
    await engine.receive(TENSORS, buckets=buckets, group_name="g", version_label="1.2", deadline_s=deadline_s)


# --- tensors by value -------------------------------------------------------------------------------------------


async def test_tensors_arrive_by_value_in_pieces_and_the_last_one_names_them(
    fake: FakeSglang, engine: SglangEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from safetensors.torch import load_file

    monkeypatch.setattr(sglang_weights, "_PIECE_BYTES", 100_000)
    await engine.pause(PauseMode.RETRACT)
    await engine.load_tensors(model, "1.2")
    bodies = fake.received[TENSOR]
    assert updates(fake) == [BEGIN, *[TENSOR] * len(bodies), END]
    assert [(body["weight_version"], body["flush_cache"]) for body in bodies] == [
        *[(None, False)] * (len(bodies) - 1),
        ("1.2", True),
    ]
    assert {body["load_format"] for body in bodies} == {"flattened_bucket"}
    pieces = [tensors_in(base64.b64decode(body["serialized_named_tensors"][0])) for body in bodies]
    assert len(pieces) > 1
    sizes = [sum(tensor.nbytes for _, tensor in piece) for piece in pieces]
    assert all(size <= 100_000 or len(piece) == 1 for size, piece in zip(sizes, pieces, strict=True))
    sent = dict(pair for piece in pieces for pair in piece)
    expected = load_file(model / "model.safetensors")
    assert sent.keys() == expected.keys()
    assert all(expected[name].equal(tensor) for name, tensor in sent.items())


async def test_every_rank_of_an_engine_gets_its_copy(fake: FakeSglang, model: Path) -> None:
    fake.ranks = 2
    engine = SglangEngine(fake.url, options=QUICK)
    await engine.load_tensors(model, "1.2")
    (first, second) = fake.received[TENSOR][0]["serialized_named_tensors"]
    assert first == second
    await engine.close()


@pytest.mark.parametrize("kind", ["tensors", "broadcast"])
async def test_in_place_pause_never_asks_for_a_flush(
    fake: FakeSglang, engine: SglangEngine, model: Path, kind: str
) -> None:
    await engine.pause(PauseMode.IN_PLACE)
    await (engine.load_tensors(model, "1.2") if kind == "tensors" else receive(engine))
    assert not any(body["flush_cache"] for body in fake.received[TENSOR] + fake.received[DISTRIBUTED])


@pytest.mark.parametrize("kind", ["tensors", "broadcast"])
async def test_refusal_after_the_deed_is_relabelled_and_a_success(
    fake: FakeSglang, engine: SglangEngine, model: Path, kind: str
) -> None:
    async def not_flushed(body: Any) -> web.StreamResponse:
        return refused(NOT_FLUSHED)

    fake.handlers[TENSOR] = fake.handlers[DISTRIBUTED] = not_flushed
    await (engine.load_tensors(model, "1.2") if kind == "tensors" else receive(engine))
    assert await engine.loaded_version() == "1.2"
    assert fake.received["/update_weight_version"] == [{"new_version": "1.2", "abort_all_requests": False}]
    assert not fake.session_open


async def test_piece_that_fails_leaves_unknown_weights_and_no_session(
    fake: FakeSglang, engine: SglangEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "_PIECE_BYTES", 1)

    async def breaks(body: Any) -> web.StreamResponse:
        return refused("Failed to update parameter online")

    fake.in_turn(TENSOR, fake.handlers[TENSOR], breaks)
    with pytest.raises(EngineLoadFailed, match="Failed to update") as failed:
        await engine.load_tensors(model, "1.2")
    assert failed.value.weights == "unknown"
    assert not fake.session_open


@pytest.mark.parametrize(("after", "weights"), [(BEGIN, "kept"), (TENSOR, "unknown")])
@pytest.mark.parametrize("how", ["removed", "cut short"])
async def test_files_that_vanish_during_the_handover_leave_no_mixture_at_work(
    fake: FakeSglang,
    engine: SglangEngine,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
    weights: str,
    how: str,
) -> None:
    monkeypatch.setattr(sglang_weights, "_PIECE_BYTES", 1)
    place, usual = shutil.copytree(model, tmp_path / "m"), fake.handlers[after]

    async def vanish(body: Any) -> web.StreamResponse:
        for file in place.glob("*.safetensors"):
            if how == "removed":
                file.unlink()
            else:
                file.write_bytes(b"")
        fake.handlers[after] = usual
        return await usual(body)

    fake.handlers[after] = vanish
    slot = EngineSlot("w.e0", engine, await engine.info(), base_model=None)
    with pytest.raises(EngineLoadFailed, match=r"No such file|became shorter") as failed:
        await swap(slot, place, "1.2", pause_mode=PauseMode.RETRACT, by_value=True)
    assert failed.value.weights == weights
    assert slot.broken == (weights == "unknown")
    assert ("/continue_generation" in fake.order) == (weights == "kept")
    assert not fake.session_open


async def test_session_of_a_worker_that_died_is_closed_first(
    fake: FakeSglang, engine: SglangEngine, model: Path
) -> None:
    fake.session_open = True
    await engine.load_tensors(model, "1.2")
    assert updates(fake)[:3] == [BEGIN, END, BEGIN]
    assert not fake.session_open


async def test_refused_session_keeps_the_weights(fake: FakeSglang, engine: SglangEngine, model: Path) -> None:
    async def refuse(body: Any) -> web.StreamResponse:
        return refused("not now")

    fake.handlers[BEGIN] = refuse
    with pytest.raises(EngineLoadFailed, match="not now") as failed:
        await engine.load_tensors(model, "1.2")
    assert failed.value.weights == "kept"
    assert TENSOR not in fake.order


async def test_wrong_label_afterwards_is_no_success(fake: FakeSglang, engine: SglangEngine) -> None:
    async def lie(body: Any) -> web.StreamResponse:
        return ok({"success": True, "message": "Succeeded"})

    fake.handlers[DISTRIBUTED] = lie
    with pytest.raises(EngineLoadFailed, match=r"it reports 1\.0 afterwards") as failed:
        await receive(engine)
    assert failed.value.weights == "unknown"


@pytest.mark.parametrize("url", ["http://192.0.2.1:30000", "http://engine.example:30000", "http://[2001:db8::1]:1"])
async def test_tensors_go_to_loopback_only(url: str, model: Path) -> None:
    engine = SglangEngine(url, options=QUICK)
    with pytest.raises(EngineLoadFailed, match="to engines on loopback only, and this one is") as failed:
        await engine._weights.load_tensors(model, "1.2")
    assert url in str(failed.value)
    assert failed.value.weights == "kept"
    await engine.close()


@pytest.mark.parametrize(
    ("url", "local"),
    [("http://127.0.0.9:1", True), ("http://localhost:1", True), ("http://[::1]:1", True), ("http://0.0.0.0:1", False)],
)
def test_what_counts_as_loopback(url: str, local: bool) -> None:
    assert sglang_weights._is_loopback(url) is local


async def test_models_that_are_too_large_are_not_handed_over(
    engine: SglangEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "MAX_TENSORS_BYTES", 1000)
    with pytest.raises(EngineLoadFailed, match="bytes of tensors; at most 1000 are handed over by value"):
        await engine.load_tensors(model, "1.2")


async def test_tensors_of_another_model_never_leave(
    fake: FakeSglang, engine: SglangEngine, model: Path, tmp_path: Path
) -> None:
    await engine.load_tensors(model, "1.2")
    other = write_random_model(tmp_path / "other", shape=TinyModelShape(hidden=32))
    fake.order.clear()
    with pytest.raises(EngineLoadFailed, match="has shape") as failed:
        await engine.load_tensors(other, "1.3")
    assert failed.value.weights == "kept"
    assert updates(fake) == []


# --- broadcasts -------------------------------------------------------------------------------------------------


async def test_broadcast_says_what_comes_and_is_asked_for_once(fake: FakeSglang, engine: SglangEngine) -> None:
    await receive(engine)
    assert updates(fake) == [BEGIN, DISTRIBUTED, END]
    assert fake.received[DISTRIBUTED] == [
        {
            "names": ["a", "b"],
            "dtypes": ["float32", "bfloat16"],
            "shapes": [[2, 3], []],
            "load_format": None,
            "group_name": "g",
            "weight_version": "1.2",
            "flush_cache": True,
            "abort_all_requests": False,
        }
    ]


async def test_each_bucket_is_asked_for_and_the_last_one_names_the_weights(
    fake: FakeSglang, engine: SglangEngine
) -> None:
    await receive(engine, buckets=(1, 1))
    assert updates(fake) == [BEGIN, DISTRIBUTED, DISTRIBUTED, END]
    said = [
        (body["names"], body["load_format"], body["weight_version"], body["flush_cache"])
        for body in fake.received[DISTRIBUTED]
    ]
    assert said == [(["a"], "flattened_bucket", None, False), (["b"], "flattened_bucket", "1.2", True)]


@pytest.mark.parametrize(("good", "weights"), [(0, "kept"), (1, "unknown")])
async def test_bucket_that_does_not_come_leaves_a_mixture_unless_it_is_the_first(
    fake: FakeSglang, engine: SglangEngine, good: int, weights: str
) -> None:
    async def breaks(body: Any) -> web.StreamResponse:
        return refused("Failed to receive weights: Connection closed by peer")

    fake.in_turn(DISTRIBUTED, *[fake.handlers[DISTRIBUTED]] * good, breaks)
    with pytest.raises(EngineLoadFailed) as failed:
        await receive(engine, buckets=(1, 1))
    assert failed.value.weights == weights
    assert not fake.session_open


@pytest.mark.parametrize(
    ("message", "weights"),
    [
        ("Failed to receive weights: Connection closed by peer", "kept"),
        ("Failed to update parameter online", "unknown"),
    ],
)
async def test_broken_broadcast_tells_whether_the_old_weights_are_whole(
    fake: FakeSglang, engine: SglangEngine, message: str, weights: str
) -> None:
    async def breaks(body: Any) -> web.StreamResponse:
        return refused(message)

    fake.handlers[DISTRIBUTED] = breaks
    with pytest.raises(EngineLoadFailed) as failed:
        await receive(engine)
    assert failed.value.weights == weights
    assert not fake.session_open


async def test_session_that_a_stuck_broadcast_left_open_is_closed_before_anything_else(
    fake: FakeSglang, engine: SglangEngine, model: Path
) -> None:
    fake.handlers[DISTRIBUTED] = never_answer
    with pytest.raises(EngineTimeout):
        await receive(engine, deadline_s=0.2)
    assert BEGIN in fake.order
    assert END not in fake.order
    await engine.leave_group("g")
    assert END in fake.order
    fake.handlers[DISTRIBUTED] = never_answer
    with pytest.raises(EngineTimeout):
        await receive(engine, deadline_s=0.2)
    await engine.load_files(model, "1.3")
    assert not fake.session_open
    assert updates(fake)[-2:] == [END, "/update_weights_from_disk"]


async def test_cancelled_broadcast_leaves_no_session(fake: FakeSglang, engine: SglangEngine) -> None:
    fake.handlers[DISTRIBUTED] = never_answer
    work = asyncio.create_task(receive(engine, deadline_s=30))
    async with asyncio.timeout(5):
        while DISTRIBUTED not in fake.order:  # noqa: ASYNC110 -- the fake can only be looked at
            await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not fake.session_open


async def test_broadcast_of_another_model_is_refused_before_it_begins(
    fake: FakeSglang, engine: SglangEngine, model: Path
) -> None:
    await engine.load_files(model, "1.1")
    with pytest.raises(EngineLoadFailed, match="tensors are missing, the first is") as failed:
        await engine.check_tensors(TENSORS)
    assert failed.value.weights == "kept"


async def test_engine_of_several_ranks_takes_no_part(fake: FakeSglang) -> None:
    fake.ranks = 2
    engine = SglangEngine(fake.url, options=QUICK)
    with pytest.raises(EngineLoadFailed, match="it has 2 ranks"):
        await engine.check_tensors(TENSORS)
    await engine.close()
