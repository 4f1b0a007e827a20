"""Rollout functions on simulated engines: how they are loaded, and what becomes of turns, masks and spans."""

import asyncio
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.episode import Episode
from rollout_workers.functions import load_rollout
from tests.workers.chat import END, ChatTokenizer
from tests.workers.scene import Scene, two_turns
from tests.workers.scripted import script


def says_numbers(request: Any, text: str) -> str:
    return f"answer {text.count('tool')}"


async def test_turns_of_an_environment_are_masked_and_tiled_by_the_spans() -> None:
    scene = Scene(two_turns, group_size=2)
    assert await scene.run()
    header, columns = scene.group()
    sample = header.samples[0]
    assert [(t.role, t.start, t.end) for t in sample.turns] == [
        ("assistant", 3, 13),
        ("tool", 13, 16),
        ("assistant", 16, 26),
    ]
    assert columns["loss_mask"][:26].tolist() == [0] * 3 + [1] * 10 + [0] * 3 + [1] * 10
    assert columns["token_ids"][13:16].tolist() == [7, 8, 9]
    assert np.all(columns["logprobs"][:26][columns["loss_mask"][:26] == 0] == 0)
    assert np.all(columns["logprobs"][:26][columns["loss_mask"][:26] == 1] < 0)
    assert (sample.tokens, sample.loss_tokens, sample.reward) == (26, 20, 0.5)
    assert [(s.start, s.end) for s in sample.spans] == [(3, 26)]
    assert scene.balanced()


async def test_samples_of_a_group_run_side_by_side() -> None:
    together = asyncio.Barrier(4)

    async def rollout(episode: Episode) -> float:
        await together.wait()
        await episode.generate()
        episode.finish("length")
        return float(episode.sample_index)

    scene = Scene(rollout)
    assert await scene.run()
    header, _ = scene.group()
    assert [sample.reward for sample in header.samples] == [0.0, 1.0, 2.0, 3.0]
    assert {sample.finish_reason for sample in header.samples} == {groups_pb2.FINISH_REASON_LENGTH}


async def test_function_sees_its_task_and_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda request, text: "two")
    seen: list[Any] = []

    async def rollout(episode: Episode) -> None:
        turn = await episode.generate()
        seen.extend([episode.metadata, episode.environment, episode.prompt_ids.tolist(), episode.task.task_id])
        seen.extend([turn.text, turn.finish_reason, turn.role, len(turn.logprobs), episode.turns[0].text])
        episode.finish()

    scene = Scene(rollout, group_size=1, metadata_json='{"a": 1}', environment="sums")
    assert await scene.run()
    assert seen == [{"a": 1}, "sums", [1, 5, 6], "t1", "two", "stop", "assistant", 4, "two"]
    assert scene.progress.samples[0].reward is None


async def test_messages_follow_the_chat_template_and_nothing_generated_is_tokenized_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = script(monkeypatch, says_numbers)

    async def rollout(episode: Episode) -> float:
        await episode.generate()
        episode.append("tool", text="4")
        episode.append("user", text="and now?")
        turn = await episode.generate()
        episode.finish()
        return float(turn.text == "answer 1")

    message = tasks_pb2.ChatMessage(role="user", content="2 + 2?")
    scene = Scene(rollout, group_size=1, messages=[message])
    assert await scene.run()
    template = ChatTokenizer().apply_chat_template(
        [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "answer 0"},
            {"role": "tool", "content": "4"},
            {"role": "user", "content": "and now?"},
        ],
        tokenize=True,
        add_generation_prompt=True,
    )
    assert inputs[1] == template
    assert scene.progress.samples[0].reward == 1.0
    # The end token is the model's own, the newline behind it the template's.
    mask = scene.progress.samples[0].mask.tolist()
    ids = scene.progress.samples[0].output_ids.tolist()
    first_end = ids.index(END)
    assert (mask[first_end], mask[first_end + 1]) == (1, 0)
    assert [note.role for note in scene.progress.samples[0].turns] == ["assistant", "tool", "assistant"]


async def test_turn_that_was_cut_is_closed_by_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = script(monkeypatch, lambda request, text: "a long answer")

    async def rollout(episode: Episode) -> None:
        turn = await episode.generate(6)
        assert turn.finish_reason == "length"
        episode.append("user", text="go on")
        await episode.generate()
        episode.finish()

    scene = Scene(rollout, group_size=1)
    assert await scene.run()
    assert inputs[1][:3] == [1, 5, 6]
    assert ChatTokenizer().decode(inputs[1][3:], skip_special_tokens=True) == "a long\nuser\ngo on\nassistant\n"
    assert inputs[1][3 + 6] == END


async def test_prompt_can_be_set_for_each_sample_before_the_first_turn() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.set_prompt(ids=[4] * (episode.sample_index + 1))
        await episode.generate()
        episode.finish()
        return 1.0

    scene = Scene(rollout, group_size=3)
    assert await scene.run()
    header, columns = scene.group()
    assert [sample.prompt_len for sample in header.samples] == [1, 2, 3]
    assert columns["token_ids"][header.samples[0].tokens :][:2].tolist() == [4, 4]


# ── loading ──────────────────────────────────────────────────────────────────


def test_function_is_loaded_by_name() -> None:
    assert load_rollout("tests.workers.scene:two_turns").function is two_turns


def plain(episode: Episode) -> float:
    return 0.0


def test_plain_function_is_refused() -> None:
    with pytest.raises(InvalidField, match="a coroutine function"):
        load_rollout("tests.workers.test_rollout_functions:plain")
