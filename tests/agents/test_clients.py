"""Agents as they are written: the clients of OpenAI and Anthropic, the OpenAI Agents SDK and mini-swe-agent.

None of them is changed: each is given a URL and a key. Needs their packages (make test-agents).
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.errors import SamplesFailed
from tests.agents.talking import AgentScene
from tests.workers.scripted import script, texts

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

# Their warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]

ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def calls_then_says(text: str) -> str:
    """A model that calls the tool once, and says its result."""
    return text.rpartition("tool\n")[2].partition("\n")[0] if "tool\n" in text else f"Let me see. {CALL}"


def of_the_model(scene: AgentScene) -> list[str]:
    """Text of each turn of the model."""
    sample = scene.progress.samples[0]
    return texts(
        [sample.output_ids[note.start : note.end].tolist() for note in sample.turns if note.role == "assistant"]
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_loop_with_the_openai_client(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: calls_then_says(text))

    async def agent(episode: AgentEpisode) -> float:
        client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        tools = [{"type": "function", "function": ADD}]
        while True:
            asked = {"model": "gpt-x", "messages": messages, "tools": tools, "temperature": 0.3}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    made = await events.get_final_completion()
            else:
                made = await client.chat.completions.create(**asked)
            message = made.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content)
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                result = str(given["a"] + given["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    scene = AgentScene(agent)
    assert await scene.run()
    assert of_the_model(scene) == [f"Let me see. {CALL}", "5"]
    assert scene.progress.samples[0].reward == 5.0


@pytest.mark.parametrize("stream", [False, True])
async def test_loop_with_the_anthropic_client(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda _, text: f"<think>hm</think>{calls_then_says(text)}")

    async def agent(episode: AgentEpisode) -> float:
        client = anthropic.AsyncAnthropic(base_url=episode.anthropic_url, api_key=episode.api_key)
        tool = {"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}
        messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        while True:
            asked = {"model": "claude-x", "max_tokens": 200, "system": "Add.", "messages": messages, "tools": [tool]}
            if stream:
                async with client.messages.stream(**asked) as events:
                    made = await events.get_final_message()
            else:
                made = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": made.content})
            assert made.content[0].type == "thinking"
            if made.stop_reason != "tool_use":
                assert made.stop_reason == "end_turn"
                return float(made.content[1].text)
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": str(each.input["a"] + each.input["b"])}
                for each in made.content
                if each.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})

    scene = AgentScene(agent, reasoning="think")
    assert await scene.run()
    assert of_the_model(scene) == [f"<think>hm</think>Let me see. {CALL}", "<think>hm</think>5"]
    assert scene.progress.samples[0].reward == 5.0


@pytest.mark.parametrize("which", ["openai", "anthropic"])
async def test_refusals_come_as_the_clients_errors_and_are_not_repeated(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: "2")
    seen: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        said: list[Any] = [{"role": "user", "content": "?"}]
        other: list[Any] = [{"role": "user", "content": "!"}]
        if which == "openai":
            client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
            await client.chat.completions.create(model="m", messages=said)
            await client.chat.completions.create(model="m", messages=other)
        else:
            client = anthropic.AsyncAnthropic(base_url=episode.anthropic_url, api_key=episode.api_key)
            await client.messages.create(model="m", max_tokens=5, messages=said)
            await client.messages.create(model="m", max_tokens=5, messages=other)
        return 1.0

    async def watched(episode: AgentEpisode) -> float:
        try:
            return await agent(episode)
        except Exception as error:
            seen.append(error)
            raise

    scene = AgentScene(watched)
    with pytest.raises(SamplesFailed, match=r"message 0 \(user\) is not what was said"):
        await scene.run()
    assert isinstance(seen[0], (openai if which == "openai" else anthropic).BadRequestError)
    assert "message 0 (user)" in str(seen[0])


async def test_openai_agents_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(disabled=True)
    script(monkeypatch, lambda _, text: calls_then_says(text))

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def agent(episode: AgentEpisode) -> float:
        client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        model = agents.OpenAIChatCompletionsModel(model="gpt-x", openai_client=client)
        made = agents.Agent(name="adder", instructions="Add.", tools=[add], model=model)
        result = await agents.Runner.run(made, "2 + 3?", max_turns=5)
        return float(result.final_output)

    scene = AgentScene(agent)
    assert await scene.run()
    assert of_the_model(scene) == [f"Let me see. {CALL}", "5"]


def mini_swe_agent(folder: Path) -> Callable[[AgentEpisode], float]:
    """mini-swe-agent as its documentation has it, in a folder; the reward: it has written the file that it was to."""
    pytest.importorskip("minisweagent")
    default = importlib.import_module("minisweagent.agents.default")
    local = importlib.import_module("minisweagent.environments.local")
    litellm = importlib.import_module("minisweagent.models.litellm_model")

    def agent(episode: AgentEpisode) -> float:
        model = litellm.LitellmModel(
            model_name="openai/gpt-x",
            model_kwargs={"api_base": episode.base_url, "api_key": episode.api_key, "temperature": 0.0},
            cost_tracking="ignore_errors",
        )
        made = default.DefaultAgent(
            model,
            local.LocalEnvironment(cwd=str(folder)),
            system_template="You are a helpful assistant.",
            instance_template="{{task}}",
        )
        ended = made.run("Write 5 into the file answer.")
        assert ended["exit_status"] == "Submitted", ended
        return float((folder / "answer").read_text())

    return agent


def shell(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


async def test_mini_swe_agent(mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    script(monkeypatch, lambda _, text: shell(done) if "<returncode>0" in text else "Now. " + shell("echo 5 > answer"))
    scene = AgentScene(mini_swe_agent(mini), context_length=4_000)
    assert await scene.run()
    assert scene.progress.samples[0].reward == 5.0
    assert of_the_model(scene) == ["Now. " + shell("echo 5 > answer"), shell(done)]
    assert scene.balanced()


async def test_mini_swe_agent_leaves_out_what_it_could_not_read(mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = "echo 5 > answer; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    script(monkeypatch, lambda _, text: shell(done) if "MUST include" in text else "What?")
    scene = AgentScene(mini_swe_agent(mini), context_length=4_000, branches="last")
    assert await scene.run()
    assert of_the_model(scene) == [shell(done)]
    assert scene.progress.discarded == {"taken_back": len("What?") + 1}


async def test_program_that_knows_the_model_by_its_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: "4")
    program = tmp_path / "agent.py"
    program.write_text(
        "import sys, anthropic, openai\n"
        "asked = [{'role': 'user', 'content': sys.stdin.read()}]\n"
        "made = openai.OpenAI().chat.completions.create(model='m', messages=asked)\n"
        "asked += [made.choices[0].message.model_dump(), {'role': 'user', 'content': 'sure?'}]\n"
        "said = anthropic.Anthropic().messages.create(model='m', max_tokens=9, messages=[\n"
        "    {'role': each['role'], 'content': each['content']} for each in asked])\n"
        "print(said.content[0].text)\n"
    )

    async def agent(episode: AgentEpisode) -> float:
        return float(await episode.run(sys.executable, str(program), text="2 + 2?"))

    scene = AgentScene(agent)
    assert await scene.run()
    assert scene.progress.samples[0].reward == 4.0
    assert of_the_model(scene) == ["4", "4"]
