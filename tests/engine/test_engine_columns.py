"""Columns in SGLang's answers: routed experts, likeliest tokens and entropies, as its wire has them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.generation import columns as wire_columns
from rollout_workers.engine.sglang.generation.columns import ExpertShape, decoded, encoded, expert_shape
from rollout_workers.engine.sglang.generation.stream import BatchStream
from rollout_workers.engine.types import SampleRequest
from tests.engine.fake_sglang import FakeSglang, answer, event, ok
from tests.support.engine_columns import rows_of, values_of

SHAPE = ExpertShape(layers=3, top_k=2, experts=8)


def request(index: int = 0, *, prompt: int = 4, start: int = 0, **more: Any) -> SampleRequest:
    ids = np.arange(1, prompt + 1, dtype=np.int32)
    asked = {"columns": ("routed_experts",), "experts_from": start, "max_new_tokens": 9, **more}
    return SampleRequest(sample_index=index, input_ids=ids, **asked)


def experts(start: int, end: int, *, layers: int = 3, top_k: int = 2) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of positions start to end, each of its own."""
    at = np.arange(start, end)[:, None, None]
    return (at + np.arange(layers)[:, None] + np.arange(top_k)) % 8


def answers(asked: Sequence[SampleRequest], *, start: int, tokens: int = 3, **meta: Any) -> list[dict[str, Any]]:
    """Whole answers to a batch with one start, as SGLang gives them."""
    return [
        answer(
            one.rid,
            list(range(10, 10 + tokens)),
            routed_experts=encoded(experts(start, len(one.input_ids) + tokens - 1)),
            completion_tokens=tokens,
            **meta,
        )
        for one in asked
    ]


def streamed(asked: Sequence[SampleRequest], events: Sequence[Any], *, piece: int, incremental: bool = True) -> Any:
    stream = BatchStream(asked, vocab_size=50, incremental=incremental, label="1.0", experts=SHAPE)
    data = b"".join(event({**entry, "index": i}) for i, entry in enumerate(events)) + b"data: [DONE]\n\n"
    for at in range(0, len(data), piece):
        stream.feed(data[at : at + piece], "1.0")
    return stream.samples()


@pytest.mark.parametrize("tokens", [0, 1, 5, 70_000])
def test_routed_experts_are_narrowed_piece_by_piece(tokens: int) -> None:
    rows = experts(0, tokens)
    back = decoded(memoryview(encoded(rows).encode()), SHAPE)
    assert back.dtype == np.uint8
    assert np.array_equal(back, rows)


def test_more_than_256_experts_take_two_bytes() -> None:
    shape = ExpertShape(layers=1, top_k=1, experts=512)
    back = decoded(memoryview(encoded(np.array([[[511]]])).encode()), shape)
    assert (back.dtype.name, back.item()) == ("int16", 511)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (encoded(np.full((1, 3, 2), 8)), "experts 8 to 8 of 8"),
        (encoded(np.full((1, 3, 2), -1)), "experts -1 to -1 of 8"),
        (encoded(np.zeros((5,), np.int32)), "no multiple of 3 layers times 2"),
        ("?" * 32, "are due|were due|no base64|no multiple"),
    ],
)
def test_routed_experts_of_another_shape_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decoded(memoryview(text.encode()), SHAPE)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_routed_experts_are_cut_out_of_events_however_these_arrive(piece: int) -> None:
    asked = [request(0, start=2), request(1, prompt=6, start=5)]
    first, second = streamed(asked, answers(asked, start=2), piece=piece)
    assert (first.fault, second.fault) == ("", "")
    assert rows_of(first).start == 2
    assert np.array_equal(rows_of(first).rows, experts(2, 6))
    # One start for the batch: what this one knew already is left out.
    assert (rows_of(second).start, rows_of(second).end) == (5, 8)
    assert np.array_equal(rows_of(second).rows, experts(5, 8))


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"routed_experts": None}, "no routed experts: was the server started"),
        ({"routed_experts": encoded(experts(0, 5))}, "routed experts of 5 inputs, and 6 are due"),
        ({"routed_experts": encoded(experts(0, 5, layers=4))}, "no multiple"),
    ],
)
def test_a_finished_sample_has_its_routed_experts_or_a_fault(meta: dict[str, Any], why: str) -> None:
    asked = [request()]
    entry = answers(asked, start=0)[0]
    entry["meta_info"] |= meta
    (sample,) = streamed(asked, [entry], piece=100)
    assert why in sample.fault


def test_an_aborted_sample_may_lack_rows_that_the_next_call_gives() -> None:
    asked = [request(0), request(1)]
    cut: dict[str, Any] = {"finish_reason": {"type": "abort", "message": "a pause"}}
    first, second = answers(asked, start=0, **cut)
    del second["meta_info"]["routed_experts"]
    whole, without = streamed(asked, [first, second], piece=50)
    assert (rows_of(whole).end, rows_of(without).end) == (6, 0)
    assert len(without.output_ids) == 3


@pytest.mark.parametrize("incremental", [True, False])
def test_likeliest_tokens_and_entropies_come_with_their_tokens(*, incremental: bool) -> None:
    asked = request(columns=("entropy", "top_logprobs_2"), top_k=3)
    support: list[list[float]] = [[-0.5, -1.5, -2.0], [-0.1, -2.5], [0.0]]
    lists: dict[str, list[Any]] = {
        "output_token_sampling_mask": [[10, 11, 12], [9, 11], [12]],
        "output_token_sampling_logprobs": support,
        "output_top_logprobs": [[[-0.5, 10, None], [-1.5, t, None]] for t in (3, 4, 5)],
    }

    def part(start: int, end: int, finish: Any) -> dict[str, Any]:
        begin = start if incremental else 0
        return answer(
            asked.rid,
            [10, 11, 12][begin:end],
            finish_reason=finish,
            completion_tokens=end,
            weight_versions=[{"version": "1.0", "start": 0, "end": end}],
            **{name: entries[begin:end] for name, entries in lists.items()},
        )

    stream = BatchStream([asked], vocab_size=50, incremental=incremental, label="1.0")
    for entry in (part(0, 1, None), part(1, 3, {"type": "length"})):
        stream.feed(event({**entry, "index": 0}), "1.0")
    stream.feed(b"data: [DONE]\n\n", "1.0")
    (sample,) = stream.samples()
    assert sample.fault == ""
    assert sample.logprobs.tolist() == pytest.approx([-0.5, -2.5, 0.0])
    expected = [-sum(np.exp(p) * p for p in each) for each in support]
    assert values_of(sample, "entropy", "entropy").tolist() == pytest.approx(expected)
    assert values_of(sample, "top_logprobs_2", "top_ids").tolist() == [[10, 3], [10, 4], [10, 5]]
    assert values_of(sample, "top_logprobs_2", "top_logprobs").dtype == np.float32


@pytest.mark.parametrize(
    ("columns", "lists", "why"),
    [
        (("top_logprobs_2",), {"output_top_logprobs": [[[-1, 1, None]]] * 2}, "2 likeliest tokens for 2 tokens, of 2"),
        (("top_logprobs_1",), {}, "0 likeliest tokens for 2"),
        (
            ("entropy",),
            {"output_token_sampling_mask": [[7], [8]], "output_token_sampling_logprobs": [-1.0, -1.0]},
            "tokens that could be drawn",
        ),
    ],
)
async def test_lists_that_are_not_of_their_tokens_are_a_fault(columns: Any, lists: Any, why: str) -> None:
    asked = request(columns=columns)
    (sample,) = streamed([asked], [answer(asked.rid, [7, 8], completion_tokens=2, **lists)], piece=99)
    assert why in sample.fault


def a_model(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


async def test_a_batch_asks_from_the_first_position_that_any_of_it_lacks(tmp_path: Path) -> None:
    config = {"text_config": {"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_routed_experts": 8}}
    async with FakeSglang() as server:
        server.model_path = str(a_model(tmp_path / "m", **config))
        server.routed_experts = True

        async def generate(body: Any) -> Any:
            start = body["routed_experts_start_len"]
            return ok(
                answers([replace(one, rid=rid) for one, rid in zip(asked, body["rid"], strict=True)], start=start)
            )

        engine = SglangEngine(server.url)
        await engine.info()
        server.handlers["/generate"] = generate
        asked = [request(0, prompt=5, start=4), request(1, start=1, columns=("routed_experts", "top_logprobs_3"))]
        first, second = await engine.generate(asked)
        assert np.array_equal(rows_of(first).rows, experts(4, 7))
        assert "0 likeliest tokens" in second.fault  # of which the fake has none
        (body,) = [one for one in server.received["/generate"] if "token_ids_logprob" not in one]
        assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)
        assert body["top_logprobs_num"] == [0, 3]
        await engine.close()


@pytest.mark.parametrize(
    ("flag", "config", "why"),
    [
        (False, {"num_experts": 8}, "started without --enable-return-routed-experts"),
        (True, {"num_experts": 8}, "tells no layers and experts"),
        (True, {"num_hidden_layers": 2}, "names no experts"),
        (True, None, "no config.json in .*; --tokenizer names another directory"),
    ],
)
async def test_a_server_that_reports_no_routed_experts_gets_no_such_task(
    tmp_path: Path,
    flag: bool,
    config: Any,
    why: str,
) -> None:
    async with FakeSglang() as server:
        server.model_path = str(tmp_path if config is None else a_model(tmp_path / "m", **config))
        server.routed_experts = flag
        engine = SglangEngine(server.url)
        await engine.info()
        with pytest.raises(InvalidField, match=why):
            engine.check_sampling(request())
        await engine.close()


async def test_entropies_need_a_draw_whose_tokens_the_server_can_list() -> None:
    async with FakeSglang() as server:
        server.mask_max_tokens = 10
        engine = SglangEngine(server.url)
        await engine.info()
        engine.check_sampling(request(columns=("entropy",), top_k=10))
        with pytest.raises(InvalidField, match=r"1 to 10 where .* the entropy is asked for"):
            engine.check_sampling(request(columns=("entropy",)))
        await engine.close()


def test_shapes_are_read_where_models_have_them(tmp_path: Path) -> None:
    path = a_model(tmp_path / "m", num_hidden_layers=4, num_experts_per_tok=8, num_local_experts=300)
    assert expert_shape([path]) == ExpertShape(4, 8, 300)
    assert expert_shape([tmp_path / "on another machine", path]) == ExpertShape(4, 8, 300)
    assert wire_columns.EXPERTS == b'"routed_experts":"'
