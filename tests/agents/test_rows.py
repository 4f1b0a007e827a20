"""Agents that compact their context, start sub-agents or ask twice: each conversation is a row of the sample."""

import asyncio
from typing import Any

import pytest

from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.errors import SamplesFailed
from tests.agents.talking import AgentScene, ask, chat, user
from tests.agents.test_going_back import said
from tests.workers.building import eventually, time_passes
from tests.workers.scripted import script, texts

SUMMARY = [{"role": "system", "content": "be brief"}, user("summary")]


def rows_of(scene: AgentScene) -> list[str]:
    """Text of each row, prompt and all."""
    sample, prompt_of = scene.progress.samples[0], scene.progress.prompt_of
    rows = (sample, *sample.rows)
    return texts([[*prompt_of(i << 16).tolist(), *row.output_ids.tolist()] for i, row in enumerate(rows)])


async def compacts(episode: AgentEpisode) -> float:
    """Two turns, then two more from a summary on."""
    first = await chat(episode, [user("a")])
    await chat(episode, [user("a"), first["message"], user("b")])
    third = await chat(episode, SUMMARY)
    await chat(episode, [*SUMMARY, third["message"], user("c")])
    return 1.0


async def test_conversation_that_is_compacted_is_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: "end" if "summary" in text else "long")
    scene = AgentScene(compacts, branches="rows", columns=["sampling_mask"])
    assert await scene.run()
    assert rows_of(scene) == [
        "user\na\nassistant\nlong\nuser\nb\nassistant\nlong",
        "system\nbe brief\nuser\nsummary\nassistant\nend\nuser\nc\nassistant\nend",
    ]
    header, _ = scene.group()
    assert [(s.trajectory, s.reward, len(s.turns), s.loss_tokens) for s in header.samples] == [
        (1, 1.0, 3, 10),
        (1, 1.0, 3, 8),
    ]
    assert scene.progress.discarded == {}
    assert scene.balanced()


async def test_sub_agents_run_beside_the_conversation_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: "done" if "part" in text.split("assistant")[0] else "plan")

    async def agent(episode: AgentEpisode) -> float:
        plan = await chat(episode, [user("task")])
        parts = await asyncio.gather(*(chat(episode, [user(f"part {i}")]) for i in range(3)))
        told = [user(part["message"]["content"]) for part in parts]
        # The same question once more is a branch, too.
        await chat(episode, [user("task")])
        await chat(episode, [user("task"), plan["message"], *told])
        return 0.5

    scene = AgentScene(agent, branches="rows")
    assert await scene.run()
    first, *further = rows_of(scene)
    assert first == "user\ntask\nassistant\nplan\nuser\ndone\nuser\ndone\nuser\ndone\nassistant\nplan"
    assert sorted(further[:3]) == [f"user\npart {i}\nassistant\ndone" for i in range(3)]
    assert further[3:] == ["user\ntask\nassistant\nplan"]
    assert scene.balanced()


async def test_requests_side_by_side_are_refused_where_branches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: "long" * 20)

    async def agent(episode: AgentEpisode) -> float:
        await asyncio.gather(*(ask(episode, "/v1/chat/completions", {"messages": [user(c)]}) for c in "ab"))
        return 1.0

    with pytest.raises(SamplesFailed, match="a request of this episode is under way"):
        await AgentScene(agent, branches="last", tokens_per_s=100.0).run()


async def test_a_full_row_may_be_gone_on_from_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: "short" if "summary" in text else "long" * 20)

    async def agent(episode: AgentEpisode) -> float:
        first = await chat(episode, [user("a")])
        with pytest.raises(AssertionError, match="context_length_exceeded"):
            await chat(episode, [user("a"), first["message"], user("b")])
        await chat(episode, SUMMARY)
        return 1.0

    scene = AgentScene(agent, branches="rows", max_new_tokens=81)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert (sample.finish, sample.rows[0].finish, said(scene)[:8]) == ("length", "stop", "user\na\na")
    assert [len(row.turns) for row in (sample, *sample.rows)] == [2, 1]


async def test_an_interrupted_agent_is_answered_from_all_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: "slowly" * 3 if "\nc" in text else "quick")
    first = AgentScene(compacts, branches="rows", tokens_per_s=100.0)
    async with first.rollout.running():
        episodes = await first.build()
        running = asyncio.create_task(episodes.run())
        await eventually(lambda: bool(rows := first.progress.samples[0].rows) and len(rows[0].turns) == 2)
        await time_passes(0.05)
        await episodes.stop()
        assert not await asyncio.wait_for(running, 10)
    kept: Any = first.progress.to_partial_rollout("w")
    before = first.progress.generated
    assert [sample.trajectory for sample in kept.header.samples] == [1, 1]
    second = AgentScene(compacts, branches="rows", partial_rollout=kept)
    assert await second.run()
    assert (second.progress.resumed, second.progress.discarded) == (before, {})
    assert second.engine.answered == {1 << 16: 1}
    assert rows_of(second)[0] == "user\na\nassistant\nquick\nuser\nb\nassistant\nquick"
    assert second.balanced()


async def test_rows_that_an_agent_does_not_begin_again_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: "quick")
    first = AgentScene(compacts, branches="rows")
    assert await first.run()
    sample = first.progress.samples[0]
    sample.finish = sample.rows[0].finish = None
    kept: Any = first.progress.to_partial_rollout("w")

    async def once(episode: AgentEpisode) -> float:
        await chat(episode, [user("a")])
        return 1.0

    second = AgentScene(once, branches="rows", partial_rollout=kept)
    assert await second.run()
    assert rows_of(second) == ["user\na\nassistant\nquick"]
    assert second.progress.discarded == {"not_repeated": 3 * 6}
    assert second.balanced()
