"""Both APIs, whole and as streams: shapes, stop reasons, usage, refusals by name, errors, and who is let in."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from buffer_wire.errors import InvalidField
from rollout_workers.agents import server
from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.engine.types import SampleRequest
from rollout_workers.errors import SamplesFailed
from rollout_workers.options import AgentOptions
from tests.agents.talking import CHAT, MESSAGES, AgentScene, ask, chat, events, user
from tests.workers.chat import ChatTokenizer
from tests.workers.scripted import script

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


def messages_body(**more: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": [user("?")], **more}


async def asked(monkeypatch: pytest.MonkeyPatch, says: str, path: str, body: dict[str, Any], **more: Any) -> Any:
    """The answer to one request."""
    script(monkeypatch, lambda *_: says)
    answers: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        status, answer = await ask(episode, path, body)
        assert status == 200, answer
        answers.append(answer)
        return 1.0

    assert await AgentScene(agent, **more).run()
    return answers[0]


# ── OpenAI ───────────────────────────────────────────────────────────────────


async def test_chat_completion_has_usage_logprobs_and_finish_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await asked(monkeypatch, "four", CHAT, {"messages": [user("?")], "logprobs": True, "max_tokens": 2})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("fo", "length")
    prompt = len(ChatTokenizer().encode("\x01user\n?\x02\n\x01assistant\n"))
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["f", "o"]
    assert all(each["logprob"] < 0 for each in choice["logprobs"]["content"])
    assert answer["object"] == "chat.completion"


async def test_stop_string_ends_a_turn_and_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await asked(monkeypatch, "a END", CHAT, {"messages": [user("?")], "stop": ["X", "END"]})
    assert answer["choices"][0]["message"]["content"] == "a "
    answer = await asked(monkeypatch, "a END", MESSAGES, messages_body(stop_sequences=["END"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


async def test_stream_of_chat_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    body = {"messages": [user("?")], "stream": True, "stream_options": {"include_usage": True}, "tools": [tool]}
    *chunks, usage, done = events(await asked(monkeypatch, f"so {CALL}", CHAT, body))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(f"so {CALL}") + 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "so"}]
    assert deltas[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "tool_calls"]


async def test_reasoning_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    says = "<think>\nhm\n</think>\n\n4"
    answer = await asked(monkeypatch, says, CHAT, {"messages": [user("?")]}, reasoning="think")
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": "4", "refusal": None, "reasoning_content": "hm",
    }  # fmt: skip
    answer = await asked(monkeypatch, says, MESSAGES, messages_body(), reasoning="think")
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


@pytest.mark.parametrize(
    "says", ["<tool_call>{oops}</tool_call>", '<tool_call>{"name": "add", "arguments": 3}</tool_call>']
)
async def test_call_that_cannot_be_read_stays_text(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await asked(monkeypatch, says, MESSAGES, messages_body(tools=[ADD]))
    assert answer["content"] == [{"type": "text", "text": says}]
    assert answer["stop_reason"] == "end_turn"


# ── Anthropic ────────────────────────────────────────────────────────────────


async def test_conversation_with_a_tool_in_anthropics_words(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = script(monkeypatch, lambda _, text: "3" if "tool\n2" in text else f"so {CALL}")

    async def agent(episode: AgentEpisode) -> float:
        body = messages_body(system=[{"type": "text", "text": "Be brief."}], tools=[ADD])
        status, first = await ask(episode, MESSAGES, body)
        assert status == 200, first
        assert (first["stop_reason"], first["usage"]["output_tokens"]) == ("tool_use", len(f"so {CALL}") + 1)
        call = first["content"][1]
        assert call == {"type": "tool_use", "id": "call00000", "name": "add", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "2"}]}
        more = [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, _text("go on")]},
        ]
        _, last = await ask(
            episode, MESSAGES, {**body, "messages": [user("?"), *more]}, **{"x-api-key": episode.api_key}
        )
        return float(last["content"][0]["text"])

    scene = AgentScene(agent)
    assert await scene.run()
    assert scene.progress.samples[0].reward == 3.0
    said = ChatTokenizer().decode(inputs[-1], skip_special_tokens=True)
    assert said == f"system\nBe brief.\nuser\n?\nassistant\nso {CALL}\ntool\n2\nuser\ngo on\nassistant\n"


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


async def test_stream_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    said = events(await asked(monkeypatch, f"so {CALL}", MESSAGES, messages_body(tools=[ADD], stream=True)))
    kinds = [event["type"] for event in said]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert said[2]["delta"] == {"type": "text_delta", "text": "so"}
    assert json.loads(said[5]["delta"]["partial_json"]) == {"a": 1}
    assert said[-2]["delta"]["stop_reason"] == "tool_use"


# ── long turns ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("path", "sign"), [(CHAT, ": the model is writing"), (MESSAGES, "event: ping")])
async def test_stream_of_a_long_turn_is_kept_alive(path: str, sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
    text = await asked(monkeypatch, "long", path, messages_body(stream=True), tokens_per_s=20.0)
    assert text.count(sign) >= 2
    assert "long" in text


# ── refusals ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"presence_penalty": 0.5}, "not supported: presence_penalty"),
        (CHAT, {"n": 2, "logit_bias": {"3": 1}}, "not supported: logit_bias"),
        (CHAT, {"n": 2}, "not supported: n"),
        (CHAT, {"tool_choice": "required"}, "not supported: tool_choice"),
        (CHAT, {"response_format": {"type": "json_object"}}, "not supported: response_format"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content of type image_url"),
        (CHAT, {"messages": []}, "messages: there are none"),
        (CHAT, {"max_tokens": -1}, "max_tokens: -1 is not at least 1"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "not supported: thinking"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0] of type web_search_20250305"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content of type image"),
        (MESSAGES, {"container": "c"}, "not supported: container"),
    ],
)
async def test_what_is_not_done_is_refused_by_name_in_the_apis_words(
    path: str, body: dict[str, Any], named: str
) -> None:
    told: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        told.append(await ask(episode, path, {"messages": [user("?")], **body}))
        return 1.0

    with pytest.raises(SamplesFailed) as failed:
        await AgentScene(agent).run()
    assert named in str(failed.value)
    (status, answer) = told[0]
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]
    assert answer.get("type", "error") == "error"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"tools": [3]},
        {"tools": [{"type": "function"}]},
        {"tools": {"a": 1}},
        {"tool_choice": 3},
        {"max_tokens": "many"},
        {"chat_template_kwargs": 3},
        {"chat_template_kwargs": {"chat_template": "{% for i in range(9**9) %}{% endfor %}"}},
        {"model": "\ud800"},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ],
)
async def test_what_is_no_request_is_refused(path: str, body: dict[str, Any]) -> None:
    told: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        told.append(await ask(episode, path, {"messages": [user("?")], **body}))
        return 1.0

    with pytest.raises(SamplesFailed):
        await AgentScene(agent).run()
    assert (told[0][0], told[0][1]["error"]["type"]) == (400, "invalid_request_error")


async def test_body_that_is_nested_too_deep_is_refused() -> None:
    told: list[Any] = []

    async def agent(episode: AgentEpisode) -> float:
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(episode.anthropic_url + CHAT, data=b"[" * 100_000) as reply,
        ):
            told.append((reply.status, reply.headers.get("x-should-retry")))
        return 1.0

    with pytest.raises(SamplesFailed, match="not a request of this API"):
        await AgentScene(agent).run()
    assert told == [(400, "false")]


async def test_tools_without_a_parser_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(episode: AgentEpisode) -> float:
        await ask(episode, MESSAGES, messages_body(tools=[ADD]))
        return 1.0

    with pytest.raises(SamplesFailed, match="--agent-tools"):
        await AgentScene(agent, tools="").run()


async def test_sampling_is_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def says(request: SampleRequest, _: str) -> str:
        seen.append(request.temperature)
        return "2"

    script(monkeypatch, says)

    async def agent(episode: AgentEpisode) -> float:
        await chat(episode, [user("?")], temperature=0.0, top_p=0.1, seed=3)
        return 1.0

    assert await AgentScene(agent).run()
    assert seen == [1.0]


async def test_nobody_without_the_episodes_own_key_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: "2")
    both = asyncio.Barrier(2)
    keys: dict[int, str] = {}
    left: list[AgentEpisode] = []

    async def agent(episode: AgentEpisode) -> float:
        keys[episode.sample_index] = episode.api_key
        await both.wait()
        for key in ("x", "é", keys[1 - episode.sample_index]):
            for path, kind in ((CHAT, None), (MESSAGES, "error")):
                status, answer = await ask(episode, path, {"messages": [user("?")]}, key=key)
                assert (status, answer.get("type")) == (401, kind)
                assert answer["error"]["type"] == "authentication_error"
        await chat(episode, [user("?")])
        left.append(episode)
        await both.wait()
        return 1.0

    scene = AgentScene(agent, group_size=2)
    async with scene.agent.running():
        assert await (await scene.build()).run()
        status, _ = await ask(left[0], CHAT, {"messages": [user("?")]})
        assert status == 401
        status, answer = await ask(left[0], "/v1/embeddings", {})
        assert (status, "/v1/chat/completions" in answer["error"]["message"]) == (404, True)
    assert scene.engine.answered == {0: 1, 1: 1}


async def test_the_responses_api_is_refused_by_name_and_fails_the_sample() -> None:
    async def agent(episode: AgentEpisode) -> float:
        status, answer = await ask(episode, "/v1/responses", {"input": "?"})
        assert (status, answer["error"]["code"]) == (404, "not_served")
        return 1.0

    with pytest.raises(SamplesFailed, match=r"the Responses API \(/v1/responses\); ask /v1/chat/completions"):
        await AgentScene(agent).run()


async def test_bodies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1_000)

    async def agent(episode: AgentEpisode) -> float:
        status, answer = await ask(episode, CHAT, {"messages": [user("?" * 1_000)]})
        assert (status, answer["error"]["code"]) == (413, "too_large")
        return 1.0

    with pytest.raises(SamplesFailed, match="at most 1,000 bytes"):
        await AgentScene(agent).run()


def test_keys_stay_on_this_machine_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AgentOptions("m:f").listen == "127.0.0.1:0"
    with pytest.raises(InvalidField, match="RB_INSECURE"):
        AgentOptions("m:f", listen="0.0.0.0:0")
    monkeypatch.setenv("RB_INSECURE", "1")
    assert AgentOptions("m:f", listen="0.0.0.0:0", advertise="host").advertise == "host"
    with pytest.raises(InvalidField, match="hermes or sglang:NAME"):
        AgentOptions("m:f", tools="qwen")


# ── SGLang's own parsers ─────────────────────────────────────────────────────


async def test_calls_are_read_by_a_parser_of_the_server(
    monkeypatch: pytest.MonkeyPatch, aiohttp_base: Callable[[web.Application], Awaitable[str]]
) -> None:
    """The server's answers are those of SGLang 0.5.23's parser `llama3`."""
    sent: list[Any] = []

    async def parse(request: web.Request) -> web.Response:
        sent.append(await request.json())
        if len(sent) > 1:
            return web.json_response({"detail": "Unsupported tool_call_parser: llama9"}, status=400)
        call = {"tool_index": 0, "name": "add", "parameters": '{"a": 1}'}
        return web.json_response({"normal_text": "", "calls": [call]})

    app = web.Application()
    app.router.add_post("/parse_function_call", parse)
    base = await aiohttp_base(app)
    monkeypatch.setattr("rollout_workers.episode.Episode.engine_address", base)
    written = '{"name": "add", "parameters": {"a": 1}}'
    answer = await asked(monkeypatch, written, MESSAGES, messages_body(tools=[ADD]), tools="sglang:llama3")
    assert answer["content"] == [{"type": "tool_use", "id": "call00000", "name": "add", "input": {"a": 1}}]
    assert sent[0]["tool_call_parser"] == "llama3"
    assert sent[0]["tools"][0]["function"]["name"] == "add"
    with pytest.raises(SamplesFailed, match="status 400 while reading tool calls: Unsupported tool_call_parser"):
        await asked(monkeypatch, written, MESSAGES, messages_body(tools=[ADD]), tools="sglang:llama9")


@pytest.fixture
async def aiohttp_base() -> AsyncIterator[Callable[[web.Application], Awaitable[str]]]:
    """Starts an application on a free port; returns its base URL."""
    runners: list[web.AppRunner] = []

    async def start(app: web.Application) -> str:
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()
