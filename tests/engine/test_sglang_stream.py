"""BatchStream fed with events as SGLang sends them: whole, cut anywhere, repeated, refused, or broken off."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollout_workers.engine.sglang.generation.columns import Malformed
from rollout_workers.engine.sglang.generation.stream import BatchStream, StreamRefused
from rollout_workers.engine.types import GeneratedSample, SampleRequest, VersionSpan
from tests.engine.fake_sglang import event
from tests.support.engine_columns import mask_of

DONE = b"data: [DONE]\n\n"
VOCABULARY = 50


def request(index: int = 0, **changes: Any) -> SampleRequest:
    prompt = np.array([3, 4], dtype=np.int32)
    return SampleRequest(**{"sample_index": index, "input_ids": prompt, "max_new_tokens": 64, **changes})


class Server:
    """Writes the events of one batch as SGLang does."""

    def __init__(self, requests: Sequence[SampleRequest], *, incremental: bool) -> None:
        self.requests = requests
        self.incremental = incremental
        self.sent: list[int] = [0] * len(requests)

    def chunk(self, index: int, upto: int, *, finish: dict[str, Any] | None = None, **meta: Any) -> bytes:
        """Tokens 0, 1, 2 ... of a sample; token t has log-probability -t, and -2t where it was drawn from a part."""
        start = self.sent[index] if self.incremental else 0
        self.sent[index] = upto
        tokens = list(range(start, upto))
        values = {
            "id": self.requests[index].rid,
            "finish_reason": finish,
            "weight_version": "1.0",
            "output_token_logprobs": [[-float(t), t, None] for t in tokens],
            "output_token_sampling_logprobs": [-2.0 * t for t in tokens],
            "output_token_sampling_mask": [[t + 1, t] for t in tokens],
            "completion_tokens": upto,
            **meta,
        }
        return event({"output_ids": tokens, "meta_info": values, "index": index})

    def last(self, index: int, upto: int, *, reason: str = "length", **meta: Any) -> bytes:
        spans = [{"version": "1.0", "start": 0, "end": upto}]
        return self.chunk(index, upto, finish={"type": reason}, **{"weight_versions": spans, **meta})


@pytest.fixture(params=["incremental", "cumulative"])
def incremental(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "incremental")


def stream_of(requests: Sequence[SampleRequest], *, incremental: bool, label: str = "1.0") -> BatchStream:
    return BatchStream(requests, vocab_size=VOCABULARY, incremental=incremental, label=label)


def tokens(sample: GeneratedSample) -> tuple[list[int], list[float]]:
    return sample.output_ids.tolist(), sample.logprobs.tolist()


def test_samples_are_put_together_from_their_events(incremental: bool) -> None:
    requests = [request(0), request(1)]
    server = Server(requests, incremental=incremental)
    sent = [server.chunk(1, 1), server.chunk(0, 1), server.chunk(1, 5), server.last(1, 6), server.last(0, 3), DONE]
    stream = stream_of(requests, incremental=incremental)
    for part in sent:
        assert not stream.done
        stream.feed(part, "1.0")
    assert stream.done
    first, second = stream.samples()
    assert tokens(first) == ([0, 1, 2], [-0.0, -1.0, -2.0])
    assert tokens(second) == ([0, 1, 2, 3, 4, 5], [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    assert (first.finish_reason, first.sample_index, first.spans) == ("length", 0, (VersionSpan("1.0", 0, 3),))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_events_may_be_cut_anywhere(incremental: bool, size: int) -> None:
    asked = request()
    server = Server([asked], incremental=incremental)
    sent = server.chunk(0, 4) + server.last(0, 9) + DONE
    stream = stream_of([asked], incremental=incremental)
    for at in range(0, len(sent), size):
        stream.feed(sent[at : at + size], "1.0")
    assert tokens(stream.samples()[0])[0] == list(range(9))
    assert stream.done


def test_the_draws_own_log_probabilities_are_kept_as_they_arrive(incremental: bool) -> None:
    asked = request(top_p=0.9)
    server = Server([asked], incremental=incremental)
    stream = stream_of([asked], incremental=incremental)
    stream.feed(server.chunk(0, 2) + server.chunk(0, 4), "1.0")
    (sample,) = stream.samples()
    assert tokens(sample) == ([0, 1, 2, 3], [-0.0, -2.0, -4.0, -6.0])
    assert sample.finish_reason == "abort"


def test_masks_are_put_together_from_their_events(incremental: bool) -> None:
    requests = [request(0, top_p=0.9, columns=("sampling_mask",)), request(1, top_p=0.9)]
    server = Server(requests, incremental=incremental)
    stream = stream_of(requests, incremental=incremental)
    stream.feed(server.chunk(0, 1) + server.chunk(0, 3), "1.0")
    stream.feed(server.chunk(0, 4) + server.last(0, 5) + server.last(1, 2) + DONE, "1.1")
    asked, not_asked = stream.samples()
    mask = mask_of(asked)
    assert (mask.values.tolist(), mask.counts.tolist()) == ([1, 0, 2, 1, 3, 2, 4, 3, 5, 4], [2] * 5)
    assert not_asked.columns == {}


def test_tokens_without_a_mask_are_left_out_and_counted(incremental: bool) -> None:
    asked = request(top_p=0.9, columns=("sampling_mask",))
    server = Server([asked], incremental=incremental)
    stream = stream_of([asked], incremental=incremental)
    stream.feed(server.chunk(0, 3, output_token_sampling_mask=[[0], [1]]), "1.0")
    (sample,) = stream.samples()
    assert (tokens(sample)[0], sample.unusable_tokens) == ([0, 1], 1)
    assert mask_of(sample).values.tolist() == [0, 1]


def test_what_arrived_of_a_stream_that_broke_off_is_kept(incremental: bool) -> None:
    requests = [request(0), request(1), request(2)]
    server = Server(requests, incremental=incremental)
    stream = stream_of(requests, incremental=incremental)
    stream.feed(server.last(0, 3) + server.chunk(1, 5) + server.chunk(1, 20)[:-10], "1.0")
    finished, cut, silent = stream.samples()
    assert (tokens(finished)[0], finished.finish_reason) == ([0, 1, 2], "length")
    assert (tokens(cut)[0], cut.finish_reason) == ([0, 1, 2, 3, 4], "abort")
    assert (tokens(silent)[0], silent.aborted_in_queue, silent.fault) == ([], True, "")
    assert stream.in_hand == 8


def test_a_sample_decodes_from_its_first_event_to_its_last(incremental: bool) -> None:
    asked = [request(0), request(1), request(2)]
    server, changes = Server(asked, incremental=incremental), list[int]()
    stream = BatchStream(asked, vocab_size=VOCABULARY, incremental=incremental, label="1.0", on_decoding=changes.append)
    stream.feed(server.chunk(0, 1) + server.chunk(1, 1), "1.0")
    assert changes == [1, 1]
    stream.feed(server.chunk(0, 9) + server.last(0, 12), "1.0")
    assert changes == [1, 1, -1]
    full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    stream.feed(server.chunk(2, 0, finish=full), "1.0")
    assert changes == [1, 1, -1], "it never ran"
    stream.close()
    stream.close()
    assert changes == [1, 1, -1, -1]


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}])
def test_what_is_in_hand_is_known_without_parsing(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(0, **sampling), request(1, **sampling)]
    server = Server(asked, incremental=False)
    stream = stream_of(asked, incremental=False)
    assert stream.in_hand == 0
    # The spans of what was seen under a label are closed by reading it, which is not what is counted here.
    for upto, label in [(2, "1.0"), (5, "1.1"), (7, "1.2"), (11, "1.2"), (12, "1.2")]:
        stream.feed(server.chunk(0, upto), label)
    stream.feed(server.chunk(1, 2) + server.chunk(1, 3), "1.2")
    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", None)
        assert stream.in_hand == 12 + 3
        stream.feed(server.chunk(0, 20) + server.last(1, 6), "1.2")
        assert stream.in_hand == 20 + 6
    assert [len(sample.output_ids) for sample in stream.samples()] == [20, 6]
    assert stream.in_hand == 20 + 6


def test_what_is_in_hand_of_a_stream_that_does_not_say_it_is_counted() -> None:
    asked = request()
    stream = stream_of([asked], incremental=False)
    meta = {"id": asked.rid, "finish_reason": None, "output_token_logprobs": [[-1.0, 7, None]] * 4}
    stream.feed(event({"output_ids": [7] * 4, "meta_info": meta, "index": 0}), "1.0")
    assert stream.in_hand == 4


def test_an_abort_outside_the_batch_repeats_what_came_and_adds_nothing(incremental: bool) -> None:
    """SGLang's answer for a retracted request: all log-probabilities again but those of the draw, and one old token."""
    choices: list[dict[str, Any]] = [{}, {"top_p": 0.9}]
    for sampling in choices:
        asked = request(columns=("sampling_mask",), **sampling)
        server = Server([asked], incremental=incremental)
        stream = stream_of([asked], incremental=incremental)
        everything = [[-float(t), t, None] for t in range(4)]
        last = {
            "output_ids": [3] if incremental else [0, 1, 2, 3],
            "meta_info": {
                "id": asked.rid,
                "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
                "output_token_logprobs": everything,
                "completion_tokens": 4,
            },
            "index": 0,
        }
        stream.feed(server.chunk(0, 1) + server.chunk(0, 4) + event(last) + DONE, "1.0")
        (sample,) = stream.samples()
        scale = -2.0 if sampling else -1.0
        assert tokens(sample) == ([0, 1, 2, 3], [scale * t for t in range(4)])
        assert mask_of(sample).values.tolist() == ([1, 0, 2, 1, 3, 2, 4, 3] if sampling else [])
        assert sample.aborted_in_queue
        assert sample.spans == (VersionSpan("1.0", 0, 4),)


def test_tokens_without_a_log_probability_are_left_out_and_counted() -> None:
    asked = request(top_p=0.9)
    server = Server([asked], incremental=True)
    stream = stream_of([asked], incremental=True)
    drawn_late = server.chunk(0, 3, output_token_sampling_logprobs=[-0.5])
    stream.feed(drawn_late, "1.0")
    (sample,) = stream.samples()
    assert (tokens(sample)[0], sample.unusable_tokens) == ([0], 2)


def test_tokens_across_a_reload_are_never_said_to_be_newer_than_they_are(incremental: bool) -> None:
    asked = request()
    server = Server([asked], incremental=incremental)
    stream = stream_of([asked], incremental=incremental, label="1.0")
    for upto, label in [(2, "1.0"), (4, "1.0"), (6, "1.1"), (8, "1.1"), (10, "1.1"), (12, "1.2"), (14, "1.2")]:
        stream.feed(server.chunk(0, upto), label)
    (sample,) = stream.samples()
    # The events under 1.1 may hold tokens of 1.0; that after them may hold the first of 1.2, and is said to be 1.1's.
    assert sample.spans == (VersionSpan("1.0", 0, 12), VersionSpan("1.1", 12, 14))


def test_the_engines_own_spans_win_over_what_was_seen(incremental: bool) -> None:
    asked = request()
    server = Server([asked], incremental=incremental)
    stream = stream_of([asked], incremental=incremental, label="1.0")
    stream.feed(server.chunk(0, 2), "1.0")
    spans = [{"version": "1.0", "start": 0, "end": 3}, {"version": "1.1", "start": 3, "end": 6}]
    stream.feed(server.last(0, 6, reason="abort", weight_versions=spans) + DONE, "1.1")
    (sample,) = stream.samples()
    assert sample.spans == (VersionSpan("1.0", 0, 3), VersionSpan("1.1", 3, 6))


def test_a_request_without_room_is_told_apart_from_its_siblings(incremental: bool) -> None:
    requests = [request(0), request(1)]
    server = Server(requests, incremental=incremental)
    stream = stream_of(requests, incremental=incremental)
    full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    stream.feed(server.chunk(1, 0, finish=full) + server.last(0, 2) + DONE, "1.0")
    assert {rid: refusal.status for rid, refusal in stream.refused().items()} == {requests[1].rid: 503}
    assert tokens(stream.samples()[0])[0] == [0, 1]


def test_an_error_in_place_of_events_says_what_the_server_said(incremental: bool) -> None:
    stream = stream_of([request()], incremental=incremental)
    with pytest.raises(StreamRefused, match="too long") as refused:
        stream.feed(event({"error": {"message": "the input is too long", "code": 400}}), "1.0")
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"data: {\n\n", b"data: []\n\n", b'data: {"index":7,"meta_info":{}}\n\n'])
def test_events_of_nobody_are_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        stream_of([request()], incremental=True).feed(body, "1.0")


def test_a_gap_makes_a_sample_unusable_and_its_tokens_count_as_received() -> None:
    asked, sibling = request(0), request(1)
    server = Server([asked, sibling], incremental=True)
    stream = stream_of([asked, sibling], incremental=True)
    stream.feed(server.chunk(0, 2), "1.0")
    server.chunk(0, 4)  # never arrives
    stream.feed(server.last(0, 6) + server.last(1, 2) + DONE, "1.0")
    bad, good = stream.samples()
    assert ("2 tokens where 4 were missing" in bad.fault, bad.unusable_tokens, len(bad.output_ids)) == (True, 2, 0)
    assert tokens(good)[0] == [0, 1]


@pytest.mark.parametrize("reason", ["length", "abort"])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}])
def test_events_of_the_other_form_than_the_server_had_said_make_a_sample_unusable(
    incremental: bool, sampling: dict[str, Any], reason: str
) -> None:
    asked, short = request(0, **sampling), request(1, **sampling)
    server = Server([asked, short], incremental=not incremental)
    stream = stream_of([asked, short], incremental=incremental)
    for upto in (2, 4):
        stream.feed(server.chunk(0, upto), "1.0")
    stream.feed(server.last(0, 6, reason=reason) + server.last(1, 2, reason=reason) + DONE, "1.0")
    bad, good = stream.samples()
    assert (bad.fault != "", len(bad.output_ids)) == (True, 0)
    assert tokens(good)[0] == [0, 1], "a single event is the same in both"


def test_an_abort_sent_together_with_the_last_tokens_repeats_one_of_them() -> None:
    asked = request()
    server = Server([asked], incremental=True)
    stream = stream_of([asked], incremental=True)
    stream.feed(server.chunk(0, 2), "1.0")
    merged = {
        "output_ids": [2, 3, 3],
        "meta_info": {
            "id": asked.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "output_token_logprobs": [[-float(t), t, None] for t in (2, 3, 0, 1, 2, 3)],
            "completion_tokens": 4,
        },
        "index": 0,
    }
    stream.feed(event(merged) + DONE, "1.0")
    (sample,) = stream.samples()
    assert (sample.fault, tokens(sample)) == ("", ([0, 1, 2, 3], [-0.0, -1.0, -2.0, -3.0]))


def test_events_that_repeat_everything_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], json.loads

    def loads(body: bytes) -> Any:
        read.append(len(body))
        return real(body)

    monkeypatch.setattr(json, "loads", loads)
    asked = request()
    server = Server([asked], incremental=False)
    stream = stream_of([asked], incremental=False)
    for upto in range(1, 200):
        stream.feed(server.chunk(0, upto), "1.0")
    stream.feed(server.last(0, 200) + DONE, "1.0")
    assert len(stream.samples()[0].output_ids) == 200
    assert len(read) == 1
