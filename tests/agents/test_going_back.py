"""Agents that part from what was said, and agents that are called again: what is kept, replayed and discarded."""

import asyncio
from typing import Any

import pytest

from rollout_buffer.v1 import groups_pb2
from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.errors import SamplesFailed
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.slots.engine_state import Event
from tests.agents.talking import AgentScene, chat, user
from tests.workers.building import eventually, time_passes
from tests.workers.scripted import script, texts


def said(scene: AgentScene) -> str:
    sample = scene.progress.samples[0]
    return texts([[*scene.progress.prompt_of(0).tolist(), *sample.output_ids.tolist()]])[0]


def whole(progress: GroupProgress) -> None:
    """Spans tile the response, and every note lies within it."""
    sample = progress.samples[0]
    ends = [0, *(span.end for span in sample.spans)]
    assert [span.start for span in sample.spans] == ends[:-1]
    assert ends[-1] == len(sample) == len(sample.logprobs) == len(sample.mask) == sample.noted


# ── branches: last ───────────────────────────────────────────────────────────


async def test_turn_that_the_agent_takes_back_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    # As an agent does that leaves an answer out which it could not read, and asks again.
    script(monkeypatch, lambda _, text: "good" if "again" in text else "bad" if "second" in text else "one")

    async def agent(episode: AgentEpisode) -> float:
        messages: list[Any] = [user("first")]
        messages.append((await chat(episode, messages))["message"])
        await chat(episode, [*messages, user("second")])
        await chat(episode, [*messages, user("second"), user("again")])
        return 1.0

    scene = AgentScene(agent, branches="last", columns=["sampling_mask"])
    assert await scene.run()
    _, columns = scene.group()
    assert len(columns["sampling_mask_counts"]) == len(columns["token_ids"])
    assert said(scene) == "user\nfirst\nassistant\none\nuser\nsecond\nuser\nagain\nassistant\ngood"
    assert scene.progress.discarded == {"taken_back": len("bad") + 1}
    assert [note.role for note in scene.progress.samples[0].turns] == ["assistant", "user", "assistant"]
    assert scene.balanced()
    whole(scene.progress)


async def test_conversation_that_is_compacted_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: "end" if "summary" in text else "long")

    async def agent(episode: AgentEpisode) -> float:
        first = await chat(episode, [user("a")])
        await chat(episode, [user("a"), first["message"], user("b")])
        answer = await chat(episode, [user("summary")], tools=[{"type": "function", "function": {"name": "f"}}])
        await chat(
            episode,
            [user("summary"), answer["message"], user("c")],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
        return 1.0

    scene = AgentScene(agent, branches="last")
    assert await scene.run()
    assert said(scene) == "user\nsummary\nassistant\nend\nuser\nc\nassistant\nend"
    assert scene.progress.discarded == {"taken_back": 10}
    assert scene.balanced()
    whole(scene.progress)


async def test_room_comes_back_with_what_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: "short" if "summary" in text else "long" * 20)

    async def agent(episode: AgentEpisode) -> float:
        first = await chat(episode, [user("a")])
        with pytest.raises(AssertionError, match="context_length_exceeded"):
            await chat(episode, [user("a"), first["message"], user("b")])
        await chat(episode, [user("summary")])
        return 1.0

    scene = AgentScene(agent, branches="last", max_new_tokens=81)
    assert await scene.run()
    assert (said(scene), scene.progress.samples[0].finish) == ("user\nsummary\nassistant\nshort", "stop")


# ── called again ─────────────────────────────────────────────────────────────


class Agent:
    """Asks three times; what it says to the answers is `told`."""

    def __init__(self) -> None:
        self.told = ["b", "c"]
        self.answers: list[str] = []

    async def __call__(self, episode: AgentEpisode) -> float:
        messages: list[Any] = [user("a")]
        for told in [*self.told, None]:
            answer = (await chat(episode, messages))["message"]
            self.answers.append(answer["content"])
            messages += [answer, user(str(told))]
        return 1.0


async def interrupted(scene: AgentScene, monkeypatch: pytest.MonkeyPatch) -> groups_pb2.Group:
    """The partial rollout of an agent that is stopped in its second turn."""
    script(monkeypatch, lambda _, text: "answer to b" if "\nb" in text else "answer to a")
    async with scene.rollout.running():
        episodes = await scene.build()
        running = asyncio.create_task(episodes.run())
        await eventually(lambda: len(scene.progress.samples[0].turns) == 2 and bool(scene.engine._decoding))
        await time_passes(0.1)
        await episodes.stop()
        assert not await asyncio.wait_for(running, 10)
    kept = scene.progress.to_partial_rollout("w")
    assert kept is not None
    assert scene.progress.discarded == {}
    return kept


async def test_agent_that_repeats_itself_goes_on_in_the_middle_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    first = AgentScene(agent, tokens_per_s=50.0)
    kept = await interrupted(first, monkeypatch)
    before = first.progress.samples[0].output_ids.tolist()
    agent.answers.clear()
    script(monkeypatch, lambda *_: "!")
    second = AgentScene(agent, partial_rollout=kept)
    assert await second.run()
    after = second.progress.samples[0].output_ids.tolist()
    assert after[: len(before)] == before
    # The first turn is replayed, the second goes on where it was, the third is new.
    assert agent.answers[0] == "answer to a"
    assert agent.answers[1].startswith("a")
    assert agent.answers[1].endswith("!")
    assert agent.answers[2] == "!"
    assert second.engine.answered == {0: 2}
    assert second.progress.discarded == {}
    assert second.balanced()
    whole(second.progress)


async def test_agent_that_says_something_else_keeps_what_was_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    first = AgentScene(agent, tokens_per_s=50.0)
    kept = await interrupted(first, monkeypatch)
    lost = first.progress.samples[0].generated - len("answer to a") - 1
    assert lost > 0
    agent.told = ["x", "y"]
    script(monkeypatch, lambda *_: "!")
    second = AgentScene(agent, partial_rollout=kept)
    assert await second.run()
    assert said(second) == "user\na\nassistant\nanswer to a\nuser\nx\nassistant\n!\nuser\ny\nassistant\n!"
    assert second.progress.discarded == {"not_repeated": lost}
    assert second.balanced()
    whole(second.progress)


async def test_agent_that_begins_otherwise_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first = AgentScene(Agent(), tokens_per_s=50.0)
    kept = await interrupted(first, monkeypatch)

    async def other(episode: AgentEpisode) -> float:
        await chat(episode, [user("z")])
        return 1.0

    script(monkeypatch, lambda *_: "!")
    second = AgentScene(other, partial_rollout=kept)
    assert await second.run()
    assert said(second) == "user\nz\nassistant\n!"
    assert second.progress.discarded == {"not_repeated": first.progress.samples[0].generated}
    assert second.balanced()


@pytest.mark.parametrize("asks", [1, 0])
async def test_agent_that_ends_sooner_than_before_has_made_what_it_asked_for_alone(
    monkeypatch: pytest.MonkeyPatch, asks: int
) -> None:
    first = AgentScene(Agent(), tokens_per_s=50.0)
    kept = await interrupted(first, monkeypatch)
    made = first.progress.samples[0].generated

    async def sooner(episode: AgentEpisode) -> float:
        for _ in range(asks):
            await chat(episode, [user("a")])
        return 1.0

    second = AgentScene(sooner, partial_rollout=kept)
    if not asks:
        with pytest.raises(SamplesFailed, match="call generate"):
            await second.run()
        return
    assert await second.run()
    assert said(second) == "user\na\nassistant\nanswer to a"
    assert second.progress.discarded == {"not_repeated": made - len("answer to a") - 1}
    assert second.balanced()
    whole(second.progress)


async def test_killed_engine_costs_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    first = AgentScene(agent, tokens_per_s=50.0)
    script(monkeypatch, lambda _, text: "answer to b" if "\nb" in text else "answer to a")
    async with first.rollout.running():
        running = asyncio.create_task((await first.build()).run())
        await eventually(lambda: len(first.progress.samples[0].turns) == 2 and bool(first.engine._decoding))
        await time_passes(0.1)
        await first.engine.die()
        await first.slot.changes.until(lambda: first.slot.suspect)
        first.slot.move(Event.LOST)
        with pytest.raises(SamplesFailed, match="it died"):
            await asyncio.wait_for(running, 20)
    assert first.progress.discarded == {}
    kept = first.progress.to_partial_rollout("w")
    assert kept is not None
    before = first.progress.samples[0].output_ids.tolist()
    agent.answers.clear()
    second = AgentScene(agent, partial_rollout=kept)
    assert await second.run()
    # The tokens that came before the engine died begin the turn, which the other engine ends.
    assert (agent.answers[0], agent.answers[1].endswith("answer to b")) == ("answer to a", True)
    assert len(agent.answers[1]) > len("answer to b")
    assert second.progress.samples[0].output_ids.tolist()[: len(before)] == before
    assert second.progress.discarded == {}
    assert second.balanced()
