"""The engine as libraries outside see it: token ids in, token ids and log-probabilities out, over HTTP on loopback.

`POST /inference/v1/generate`, as vLLM has it and the package renderers calls it. Who asks is told by the header
X-Session-ID, which names a conversation; what is not a conversation's is refused. Invariants: a conversation only
grows: a request's tokens begin with all that the conversation has so far, generated tokens as they were generated; what
comes on top is the environment's.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from aiohttp import web

from rollout_workers.episode import Episode
from rollout_workers.errors import EpisodeFull

SESSION_HEADER = "X-Session-ID"
_MAX_BODY_BYTES = 256 << 20
_NO_EVIDENCE = -9_999.0
"""vLLM's log-probability for "unknown", which callers refuse."""
_OF_A_TURN = frozenset({"max_tokens", "min_tokens", "stop", "stop_token_ids"})
_OF_THE_TASK = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"})
"""Sampling for which the task's own parameters are used, whatever a request says."""
_OF_THE_ANSWER = frozenset(
    {
        "n",
        "logprobs",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "cache_salt",
        "routed_experts_prompt_start",
    }
)
"""Parameters that change no token; there is one answer, with its log-probabilities."""
_IMAGES = frozenset({"content_parts", "features"})
"""Fields of a request, beside its tokens, that an engine which is given tokens alone would not see."""


class Conversation:
    """Episode that is driven from outside. `role_of_next` returns the role of whoever wrote the tokens added since the
    last turn.
    """

    def __init__(self, episode: Episode, role_of_next: Callable[[], str]) -> None:
        self._episode = episode
        self._role_of_next = role_of_next
        self.fault: Exception | None = None
        """Reason why the requests cannot become one sample."""
        self.full = False
        self.cut = False
        """True when the last turn ended for its length."""

    async def generate(self, ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request. Raises EpisodeFull, and whatever ends the episode."""
        _check(sampling)
        episode = self._episode
        have = np.concatenate([episode.prompt_ids, *(turn.ids for turn in episode.turns)])
        if not episode.turns:
            await episode.set_prompt(ids=ids)
        elif len(ids) < len(have) or not np.array_equal(have, ids[: len(have)]):
            raise ValueError(
                "the conversation does not go on from what was generated, so it is not one sample: its renderer has "
                "no bridge for this model, or it was shortened, or branched"
            )
        elif len(ids) > len(have):
            episode.append(self._role_of_next(), ids=ids[len(have) :])
        most = sampling.get("max_tokens")
        turn = await episode.generate(
            int(most) if most else None,
            min_new_tokens=int(sampling.get("min_tokens") or 0),
            stop=[sampling["stop"]] if isinstance(sampling.get("stop"), str) else sampling.get("stop") or (),
            stop_token_ids=sampling.get("stop_token_ids") or (),
        )
        self.cut = turn.finish_reason == "length"
        generated = turn.ids.tolist()
        logprobs = np.maximum(turn.logprobs, _NO_EVIDENCE + 1).tolist()
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(generated, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": generated,
            "logprobs": {"content": content},
            "finish_reason": turn.finish_reason,
        }
        return {"request_id": f"{len(episode.turns)}", "choices": [choice]}


def _check(sampling: dict[str, Any]) -> None:
    """Raise ValueError for parameters that would change the tokens and are not supported, `n` above 1 among them."""
    known = _OF_A_TURN | _OF_THE_TASK | _OF_THE_ANSWER
    asked = sorted(name for name, value in sampling.items() if name not in known and value)
    if sampling.get("n") not in (None, 1):
        asked.append("n")
    if asked:
        raise ValueError(f"sampling parameters that are not supported: {', '.join(asked)}")


def _check_tokens_only(body: dict[str, Any]) -> None:
    """Raise ValueError for a request with images."""
    if images := sorted(name for name in _IMAGES if body.get(name)):
        raise ValueError(f"images are not supported: {', '.join(images)}")


class TokenServer:
    """Serves the conversations that are registered."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._conversations: dict[str, Conversation] = {}
        self.base_url = ""
        """Base URL, set once the server is serving, with /v1 behind it as OpenAI's clients have it."""

    def register(self, session_id: str, conversation: Conversation) -> None:
        """Take requests of this session."""
        self._conversations[session_id] = conversation

    def forget(self, session_id: str) -> None:
        """Refuse its requests from now on."""
        self._conversations.pop(session_id, None)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve on a free port of 127.0.0.1."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            self.base_url = f"http://127.0.0.1:{port}/v1"
            yield
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        # Without max_model_len: the context is the engine's, which differs from conversation to conversation.
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _generate(self, request: web.Request) -> web.Response:
        conversation = self._conversations.get(request.headers.get(SESSION_HEADER, ""))
        if conversation is None:
            return _refusal(404, "no such conversation")
        body = await request.json()
        try:
            _check_tokens_only(body)
            return web.json_response(
                await conversation.generate(list(body["token_ids"]), body.get("sampling_params") or {})
            )
        except EpisodeFull as full:
            conversation.full = True
            return _refusal(400, f"maximum context length: {full}")
        except Exception as error:  # noqa: BLE001 - it is told to whoever awaits the sample
            conversation.fault = error
            return _refusal(400, str(error))


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
