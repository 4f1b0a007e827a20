"""Interruptions in the middle of an agent's request: new weights, a connection that breaks, the end of the episode."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.engine.types import PauseMode
from rollout_workers.errors import SamplesFailed
from rollout_workers.slots.engine_state import Event
from rollout_workers.versions import Version
from tests.agents.talking import CHAT, AgentScene, ask, chat, user
from tests.workers.building import eventually, time_passes
from tests.workers.scripted import script
from tests.workers.test_rollout_engine import Breaking
from tests.workers.training import until


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_request_goes_on_through_new_weights(
    mode: PauseMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: "a long answer")
    answers: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        answers.append(await ask(episode, CHAT, {"messages": [user("?")], "logprobs": True}))
        return 1.0

    scene = AgentScene(agent, tokens_per_s=50.0)
    async with scene.rollout.running():
        running = asyncio.create_task((await scene.build()).run())
        await eventually(lambda: bool(scene.engine._decoding))
        await time_passes(0.1)
        await scene.engine.pause(mode)
        await scene.engine.load_files(tmp_path, "1.1")
        scene.slot.adopt(Version.parse("1.1") or scene.slot.loaded)
        await scene.engine.resume()
        assert await asyncio.wait_for(running, 20)
    sample = scene.progress.samples[0]
    assert [span.version for span in sample.spans] == [Version(1, 0), Version(1, 1)]
    ((status, answer),) = answers
    assert (status, answer["usage"]["completion_tokens"]) == (200, len(sample))
    logprobs = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
    assert logprobs == sample.logprobs.tolist()
    assert scene.balanced()


async def test_request_goes_on_when_the_connection_to_the_engine_broke() -> None:
    async def agent(episode: AgentEpisode) -> float:
        await chat(episode, [user("?")])
        return 1.0

    scene = AgentScene(agent, most=3)
    scene.engine.__class__ = Breaking
    async with scene.rollout.running():
        running = asyncio.create_task((await scene.build()).run())
        await scene.slot.changes.until(lambda: scene.slot.suspect)
        # What the guard does when the engine answers its probe.
        scene.slot.move(Event.ANSWERED)
        assert await asyncio.wait_for(running, 20)
    assert scene.progress.samples[0].output_ids[:3].tolist() == [50, 51, 52]
    assert scene.progress.discarded == {}
    assert scene.balanced()


async def test_end_of_an_episode_ends_its_requests_and_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: "long" * 100)
    monkeypatch.setenv("RB_TOKEN", "secret")
    told: list[Any] = []
    pids = tmp_path / "pids"
    program = (
        "import os, subprocess, sys, time\n"
        "assert 'RB_TOKEN' not in os.environ and os.environ['OPENAI_BASE_URL'].endswith('/v1')\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )

    async def agent(episode: AgentEpisode) -> float:
        async def asks() -> None:
            told.append(await ask(episode, CHAT, {"messages": [user("?")]}))

        left.append(asyncio.create_task(asks()))
        await episode.run(sys.executable, "-c", program)
        return 1.0

    left: list[asyncio.Task[None]] = []
    scene = AgentScene(agent, tokens_per_s=50.0)
    async with scene.rollout.running():
        running = asyncio.create_task((await scene.build()).run())
        await eventually(lambda: bool(scene.engine._decoding) and pids.exists() and len(pids.read_text().split()) == 2)
        await time_passes(0.1)
        scene.slot.move(Event.QUARANTINED)
        # The engine's call comes back with what it has, and then the agent is cancelled.
        await scene.engine.abort(list(scene.engine._decoding))
        assert not await asyncio.wait_for(running, 10)
        await left[0]
    assert told[0][0] == 503
    assert told[0][1]["error"]["code"] == "ended"
    for pid in map(int, pids.read_text().split()):
        await eventually(lambda pid=pid: _is_gone(pid))  # type: ignore[misc]
    # An agent goes on from its turns: nothing is lost.
    assert scene.progress.discarded == {}
    assert scene.progress.samples[0].generated > 0


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_program_that_fails_says_why() -> None:
    async def agent(episode: AgentEpisode) -> float:
        await episode.run("sh", "-c", "cat >&2; exit 3", text="no such tool")
        return 1.0

    with pytest.raises(SamplesFailed, match="sh ended with exit code 3: no such tool"):
        await AgentScene(agent).run()

    async def another(episode: AgentEpisode) -> float:
        await episode.run("no-such-program")
        return 1.0

    with pytest.raises(SamplesFailed, match=r"no-such-program ended with exit code 1: cannot be started: .*No such"):
        await AgentScene(another).run()


def test_worker_that_is_killed_leaves_no_program_behind(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    worker = (
        "import asyncio, types\n"
        "from rollout_workers.agents.episode import AgentEpisode\n"
        "from rollout_workers.agents.server import Place\n"
        "task = types.SimpleNamespace(metadata_json='', environment='', messages=[])\n"
        "episode = AgentEpisode(types.SimpleNamespace(task=task, sample_index=0), Place('e', 't', 'http://x'))\n"
        f"asyncio.run(episode.run('sh', '-c', 'echo $$ > {pid}; exec sleep 600'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", worker])
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), "the program runs")
    process.kill()
    process.wait()
    until(lambda: _is_gone(int(pid.read_text())), "the program is gone")


async def test_plain_function_runs_in_a_thread_and_one_that_goes_on_asking_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_workers.agents.rollout._LAST_WORDS_S", 0.05)
    script(monkeypatch, lambda *_: "2")
    loop, ended = asyncio.get_running_loop(), threading.Event()

    def asks(episode: AgentEpisode, text: str) -> int:
        return asyncio.run_coroutine_threadsafe(ask(episode, CHAT, {"messages": [user(text)]}), loop).result()[0]

    def agent(episode: AgentEpisode) -> float:
        assert asks(episode, "a") == 200
        # It does not go on from there, and the agent does not give up.
        while (status := asks(episode, "b")) != 401:
            assert status == 400
        ended.set()
        return 1.0

    scene = AgentScene(agent)
    async with scene.rollout.running():
        with pytest.raises(SamplesFailed, match=r"message 0 \(user\)"):
            await (await scene.build()).run()
        await eventually(ended.is_set)
