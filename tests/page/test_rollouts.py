"""Single rollouts on the page: tokens by version and mask, as ids and, with a tokenizer.json, as text."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer.v1 import common_pb2
from tests.page.browser import Screen
from tests.support.rpc import RunRpc, make_group
from tests.support.service import ServiceProcess

Named = Callable[..., RunRpc]


def fetched(service: ServiceProcess, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"{service.admin}{path}", timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_groups_and_the_tokens_of_a_sample_are_answered_as_json(service: ServiceProcess, named: Named) -> None:
    run = named("json", batch_groups=2, max_queued_groups=8)
    run.fill(2)
    run.pull(0)
    run.push([make_group("later", lengths=(5, 40), rewards=(0.0, 1.0))])
    base = f"/api/runs/{run.run_id}/groups"
    assert fetched(service, base)[1]["groups"] == [
        {"group_id": "later/0", "environment": "sums", "samples": 2, "reward": 0.5}
    ]
    assert [one["group_id"] for one in fetched(service, f"{base}?step=0")[1]["groups"]] == ["x0/0", "x1/0"]
    values = fetched(service, f"{base}/later/0?sample=1")[1]
    assert (len(values["token_ids"]), values["loss_mask"]) == (40, [1] * 40)
    assert values["samples"][1]["spans"] == [{"version": "1.0", "start": 1, "end": 40}]
    for path, status in (
        (f"{base}?step=9", 404),
        (f"{base}?step=x", 400),
        (f"{base}/absent/0", 404),
        (f"{base}/later/0?sample=2", 400),
        (f"{base}/la%20ter/0", 400),
        ("/api/runs/absent/groups", 404),
    ):
        assert fetched(service, path)[0] == status, path


@pytest.mark.browser
def test_a_sample_is_read_as_text_with_its_versions_in_colours(screen: Screen, named: Named, tmp_path: Path) -> None:
    run = named("read", batch_groups=2, max_queued_groups=8)
    group = make_group("q", lengths=(4, 6), rewards=(0.25, 0.75))
    first, second = group.header.samples[1].spans[0], group.header.samples[1].spans.add()
    second.CopyFrom(first)
    first.end = second.start = 3
    run.publish(1)
    second.version.CopyFrom(common_pb2.WeightVersion(term=1, version=1))
    run.push([group])
    screen.visit(run.run_id)
    screen.until_shown("#rollouts-queue")
    assert screen.at("#rollouts-batch").is_disabled()
    screen.at("#rollouts-queue").click()
    screen.until("#rollouts-of", "1 group of the queue")
    screen.at("#rollout-sample").select_option("1")
    screen.until("#rollout-facts", "reward 0.750, ended by stop")
    screen.until("#rollout-legend", "the promptversion 1.0version 1.1")
    assert screen.at("#rollout-text .v0").count() == screen.at("#rollout-text .v1").count() == 1
    words = {
        "model": {"type": "BPE", "vocab": {f"\u0120w{i}": i for i in range(1_000)}},
        "decoder": {"type": "ByteLevel"},
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(words))
    screen.at("#tokenizer").set_input_files(file)
    screen.until("#rollout-text .v1", " w")
    other = tmp_path / "other.json"
    other.write_text("[]")
    screen.at("#tokenizer").set_input_files(other)
    screen.until("#rollouts-error", "no tokenizer.json")
    assert screen.errors == []


@pytest.mark.browser
def test_pieces_of_every_kind_of_tokenizer_become_text(screen: Screen) -> None:
    screen.visit()
    made = {
        "bytes": [
            {"model": {"vocab": {"\u00c3": 0, "\u00a9": 1, "\u0120a": 2}}, "decoder": {"type": "ByteLevel"}},
            [0, 1, 2],
        ],
        "sentences": [{"model": {"vocab": [["\u2581the", -1], ["<0xC3>", -2], ["<0xA9>", -2]]}}, [0, 1, 2]],
        "added": [
            {
                "model": {"vocab": {"a": 0}},
                "decoder": {"type": "ByteLevel"},
                "added_tokens": [{"id": 1, "content": "<|end|>"}],
            },
            [0, 1, 7],
        ],
    }
    found = screen.page.evaluate(
        "async (made) => { const { Tokenizer } = await import('/page/tokenizer.js'); return Object.fromEntries("
        "Object.entries(made).map(([name, [file, ids]]) => [name, new Tokenizer(file).decode(ids)])); }",
        made,
    )
    assert found == {"bytes": "\u00e9 a", "sentences": " the\u00e9", "added": "a<|end|>\u27e87\u27e9"}
