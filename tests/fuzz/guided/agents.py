"""Requests of agents to the model: bodies of both APIs, and whatever else comes over the connection.

The first byte says what the rest is, modulo 3: a body of /v1/chat/completions, of /v1/messages, or all that is sent, in
which EPISODE and TOKEN stand for those of the episode. Every input has an episode of its own, of a simulated engine.
"""

import asyncio
import contextlib
import json
import re
from typing import Any

from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.agents.rollout import AgentRollout
from rollout_workers.errors import SamplesFailed
from rollout_workers.functions import Rollout
from rollout_workers.options import AgentOptions
from tests.fuzz.guided.http import Watched, exchanged, status_of
from tests.workers.scene import Scene

CHAT, MESSAGES, RAW = b"\0", b"\1", b"\2"
PATHS = {0: "/v1/chat/completions", 1: "/v1/messages"}
AGAIN_EVERY = 100
"""Inputs between two looks whether an ordinary request is answered."""
_TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def _seed(kind: bytes, **body: Any) -> bytes:
    return kind + json.dumps({**_PLAIN, **body}).encode()


SEEDS = (
    _seed(CHAT),
    _seed(CHAT, stream=True, stream_options={"include_usage": True}, stop=["x"], logprobs=True, n=1),
    _seed(CHAT, tools=[{"type": "function", "function": _TOOL}], tool_choice="auto", chat_template_kwargs={"a": 1}),
    _seed(
        CHAT,
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": "b", "tool_call_id": "c", "name": "f"},
        ],
    ),
    _seed(MESSAGES, system="s", stop_sequences=["x"]),
    _seed(MESSAGES, tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "auto"}, stream=True),
    _seed(
        MESSAGES,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
        ],
    ),
    RAW + b"GET /EPISODE/v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer TOKEN\r\n\r\n",
    RAW
    + b"POST /EPISODE/v1/messages HTTP/1.1\r\nHost: h\r\nx-api-key: TOKEN\r\n"
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    RAW + b"POST /EPISODE/v1/responses HTTP/1.1\r\nHost: h\r\nx-api-key: TOKEN\r\nContent-Length: 0\r\n\r\n",
    RAW + b"POST /nobody HTTP/1.1\r\nHost: [::1]:1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
)


class _Endpoint:
    """The server, which all inputs meet, and the agent that sends one to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._watched = Watched(self._loop)
        self._agent = AgentRollout(self._ask, AgentOptions("m:f", tools="hermes"))
        self._running = self._agent.running()
        self._loop.run_until_complete(self._running.__aenter__())
        self._sent = self._told = b""
        self.met = 0

    def meets(self, data: bytes) -> bytes:
        """Answers to one input."""
        self.met += 1
        self._sent, self._told = data, b""
        scene = Scene(self._agent, group_size=1, most=1)
        scene.rollout = Rollout("m:f", self._agent)
        with contextlib.suppress(SamplesFailed):  # A refused request fails its sample.
            self._loop.run_until_complete(scene.run())
        self._watched.check()
        assert scene.balanced(), "tokens are lost"
        return self._told

    async def _ask(self, episode: AgentEpisode) -> float:
        kind = (self._sent[:1] or CHAT)[0] % 3
        place = episode.anthropic_url.split("/")
        host, name = place[2], place[3]
        if kind == RAW[0]:
            sent = self._sent[1:].replace(b"EPISODE", name.encode()).replace(b"TOKEN", episode.api_key.encode())
        else:
            body = self._sent[1:]
            head = f"POST /{name}{PATHS[kind]} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {episode.api_key}\r\n"
            sent = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        self._told = await exchanged(host, sent, whole=kind != RAW[0])
        return 1.0


_ENDPOINT: list[_Endpoint] = []


def one(data: bytes) -> None:
    """Check that an input is answered, or refused with a status below 500, and that the next episode is served."""
    if not _ENDPOINT:
        _ENDPOINT.append(_Endpoint())
    endpoint = _ENDPOINT[0]
    told = endpoint.meets(data)
    assert status_of(told) < 500, told[:2_000]
    assert not re.search(rb"(Attribute|Type|Key|Index|Overflow)Error", told), told[:2_000]
    if (data[:1] or CHAT)[0] % 3 != RAW[0]:
        assert status_of(told) >= 200, "no answer"
    if endpoint.met % AGAIN_EVERY == 0:
        assert status_of(endpoint.meets(SEEDS[0])) == 200, "an ordinary request is not answered"
