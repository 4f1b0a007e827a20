"""Requests of an agent become one sample: exact tokens, turns in their places, and what is no sample is refused."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout_workers.agents import rendering
from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.errors import SamplesFailed
from tests.agents.talking import CHAT, AgentScene, ask, chat, user
from tests.workers.building import eventually
from tests.workers.chat import END, ChatTokenizer
from tests.workers.scripted import script, texts

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


async def two_turns(episode: AgentEpisode) -> float:
    first = await chat(episode, [user("1 + 1?")])
    await chat(episode, [user("1 + 1?"), first["message"], user("sure?")])
    return 0.5


async def test_turns_are_stitched_token_by_token_into_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    # Spaces that the agent gives back stripped, and two ways to write the same: what was drawn is what is kept.
    inputs = script(monkeypatch, lambda _, text: " 2 " if "sure" not in text else "yes")

    async def agent(episode: AgentEpisode) -> float:
        first = await chat(episode, [user("1 + 1?")])
        assert first["message"]["content"] == " 2 "
        again = {"role": "assistant", "content": "2"}
        await chat(episode, [user("1 + 1?"), again, user("sure?")])
        return 0.5

    scene = AgentScene(agent, group_size=2)
    assert await scene.run()
    header, columns = scene.group()
    sample = header.samples[0]
    assert [turn.role for turn in sample.turns] == ["assistant", "user", "assistant"]
    assert texts([columns["token_ids"][: sample.tokens].tolist()]) == [
        "user\n1 + 1?\nassistant\n 2 \nuser\nsure?\nassistant\nyes"
    ]
    ids = columns["token_ids"][: sample.tokens]
    whole = [user("1 + 1?"), {"role": "assistant", "content": " 2 "}, user("sure?")]
    prompt = ChatTokenizer().apply_chat_template(whole, tokenize=True, add_generation_prompt=True)
    assert ids.tolist() == [*prompt, *ChatTokenizer().encode("yes"), END]
    second = next(ids for ids in inputs if "sure" in ChatTokenizer().decode(ids, skip_special_tokens=True))
    assert ids[: len(second)].tolist() == second
    mask = columns["loss_mask"][: sample.tokens].astype(bool)
    assert texts([ids[mask].tolist()]) == [" 2 yes"]
    assert (ids[mask] == END).sum() == 2
    assert np.all(columns["logprobs"][: sample.tokens][mask] < 0)
    assert [s.reward for s in header.samples] == [0.5, 0.5]
    assert scene.balanced()


async def test_tool_calls_are_read_and_come_back_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = 'so: <tool_call>{"name":"add",  "arguments": {"a": 1}}</tool_call>'
    script(monkeypatch, lambda _, text: "3" if "tool\n2" in text else written)

    async def agent(episode: AgentEpisode) -> float:
        said: list[Any] = [user("?")]
        first = await chat(episode, said, tools=[TOOL])
        assert first["finish_reason"] == "tool_calls"
        assert first["message"]["content"] == "so:"
        (call,) = first["message"]["tool_calls"]
        assert (call["id"], call["function"]) == ("call00000", {"name": "add", "arguments": '{"a": 1}'})
        said += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
        last = await chat(episode, said, tools=[TOOL])
        return float(last["message"]["content"])

    scene = AgentScene(agent)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert sample.reward == 3.0
    assert texts([sample.output_ids[sample.mask == 1].tolist()]) == [written + "3"]


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([user("1 + 2?"), None, user("sure?")], "message 0 (user) is not what was said: at character 4 '2?' and not"),
        ([user("1 + 1?"), {"role": "assistant", "content": "3"}, user("sure?")], "message 1 (assistant) is not what"),
        ([user("1 + 1?"), user("2"), user("sure?")], "message 1 (assistant) is now one of user"),
        ([user("1 + 1?")], "it has 1 messages and ends where the conversation has 2"),
        ([user("1 + 1?"), None], "a last message of the assistant"),
        ([user("sure?"), user("sure?"), user("sure?")], "message 0 (user)"),
        ([user("1 + 1?"), None, {"role": "assistant", "content": "so"}], "a last message of the assistant"),
    ],
)
async def test_what_does_not_go_on_from_what_was_said_is_refused_with_its_place(
    messages: list[Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: "2")
    told: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        first = await chat(episode, [user("1 + 1?")])
        told.append(await ask(episode, CHAT, {"messages": [m or first["message"] for m in messages]}))
        return 1.0  # As if nothing was wrong.

    scene = AgentScene(agent)
    with pytest.raises(SamplesFailed) as failed:
        await scene.run()
    assert place in str(failed.value)
    status, answer = told[0]
    assert status == 400
    assert place in answer["error"]["message"]
    assert answer["error"]["code"] in {"branch", "unsupported"}


async def test_template_that_rewrites_what_was_said_is_found_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: "2")
    plain = ChatTokenizer.apply_chat_template

    def counting(self: ChatTokenizer, conversation: Any, **more: Any) -> Any:
        head = [{"role": "system", "content": f"{len(conversation)} messages"}]
        return plain(self, [*head, *conversation], **more)

    monkeypatch.setattr(ChatTokenizer, "apply_chat_template", counting)
    with pytest.raises(
        SamplesFailed, match=r"before turn 0 of the model the chat template wrote '1 m.* at character 8"
    ):
        await AgentScene(two_turns).run()


async def test_template_that_wants_calls_before_their_results_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    written = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    script(monkeypatch, lambda _, text: "3" if "tool\n2" in text else written)

    def strict(self: ChatTokenizer, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **_: Any) -> Any:
        text = ""
        for before, message in zip([None, *conversation], conversation, strict=False):
            if message["role"] == "tool" and not (before or {}).get("tool_calls"):
                raise ValueError("a result without a call")
            calls = "".join(f"[{call['function']['name']}]" for call in message.get("tool_calls", ()))
            text += f"\x01{message['role']}\n{message['content']}{calls}\x02\n"
        return text + ("\x01assistant\n" if add_generation_prompt else "")

    monkeypatch.setattr(ChatTokenizer, "apply_chat_template", strict)

    async def agent(episode: AgentEpisode) -> float:
        said: list[Any] = [user("?")]
        said.append((await chat(episode, said, tools=[TOOL]))["message"])
        said.append({"role": "tool", "tool_call_id": "call00000", "content": "2"})
        return float((await chat(episode, said, tools=[TOOL]))["message"]["content"])

    scene = AgentScene(agent)
    assert await scene.run()
    ids = scene.progress.samples[0].output_ids.tolist()
    assert texts([ids]) == [f"{written}\ntool\n2\nassistant\n3"]


async def test_template_that_leaves_out_what_was_said_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: "2")
    plain = ChatTokenizer.apply_chat_template

    def deaf(self: ChatTokenizer, conversation: Any, **more: Any) -> Any:
        return plain(self, [message for message in conversation if message["role"] != "tool"], **more)

    monkeypatch.setattr(ChatTokenizer, "apply_chat_template", deaf)

    async def agent(episode: AgentEpisode) -> float:
        first = await chat(episode, [user("?")])
        await chat(episode, [user("?"), first["message"], {"role": "tool", "content": "4"}])
        return 1.0

    with pytest.raises(SamplesFailed, match="the chat template leaves message 2 out"):
        await AgentScene(agent).run()


async def test_template_that_ends_a_conversation_with_a_token_of_its_own_is_no_drift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script(monkeypatch, lambda *_: "2")
    plain = ChatTokenizer.apply_chat_template

    def ending(self: ChatTokenizer, conversation: Any, **more: Any) -> Any:
        return plain(self, conversation, **more) + ("" if more["add_generation_prompt"] else "END")

    monkeypatch.setattr(ChatTokenizer, "apply_chat_template", ending)
    scene = AgentScene(two_turns)
    assert await scene.run()
    assert texts([scene.progress.samples[0].output_ids.tolist()]) == ["2\nuser\nsure?\nassistant\n2"]


def test_place_of_a_difference() -> None:
    assert [rendering.difference(*pair) for pair in (("abc", "abd"), ("ab", "abc"), ("", "a"))] == [2, 2, 0]
    assert [rendering.difference(*pair) for pair in (("abc", "abc"), ("xbc", "abc"), ("abcab", "abxab"))] == [3, 0, 2]


async def test_request_beside_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.agents.rollout._LAST_WORDS_S", 0.05)
    script(monkeypatch, lambda *_: "2" * 200)

    async def agent(episode: AgentEpisode) -> float:
        await asyncio.gather(chat(episode, [user("a")]), ask(episode, CHAT, {"messages": [user("b")]}))
        return 1.0

    with pytest.raises(SamplesFailed, match="a request of this episode is under way"):
        await AgentScene(agent, tokens_per_s=50.0).run()


async def test_request_that_is_sent_again_is_answered_with_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: "2")

    async def agent(episode: AgentEpisode) -> float:
        body = {"messages": [user("a")]}
        retry = {"x-stainless-retry-count": "1"}
        under_way = asyncio.create_task(ask(episode, CHAT, body))
        await asyncio.sleep(0)
        answers = [await under_way, await ask(episode, CHAT, body, **retry), await ask(episode, CHAT, body, **retry)]
        assert answers[0][1]["id"] == answers[1][1]["id"] == answers[2][1]["id"]
        return 1.0

    scene = AgentScene(agent)
    assert await scene.run()
    assert scene.engine.answered == {0: 1}
    assert len(scene.progress.samples[0].turns) == 1


async def test_agent_that_does_not_wait_for_its_answer_has_made_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: "2" * 200 if "\nb" in text else "2")
    left: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        await chat(episode, [user("a")])
        left.append(asyncio.create_task(ask(episode, CHAT, {"messages": [user("a"), _assistant("2"), user("b")]})))
        await eventually(lambda: len(scene.progress.samples[0].turns) == 2)
        return 1.0

    scene = AgentScene(agent, tokens_per_s=50.0)
    with pytest.raises(SamplesFailed, match="returned while a request of its was unanswered"):
        await scene.run()
    status, answer = await left[0]
    assert (status, answer["error"]["code"]) == (503, "ended")


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_context_that_is_used_up_ends_the_sample_as_length(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: "2" * 50)
    told: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        said = [user("a")]
        while True:
            status, answer = await ask(episode, CHAT, {"messages": said})
            told.append(status)
            if status != 200:
                assert answer["error"]["code"] == "context_length_exceeded"
                return 0.25
            said += [answer["choices"][0]["message"], user("go on")]

    scene = AgentScene(agent, max_new_tokens=120)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert (sample.finish, sample.generated, sample.reward) == ("length", 120, 0.25)
    assert told == [200, 200, 200, 400]
