"""A simulated engine that says what a test wants it to say."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rollout_workers.engine.simulated import engine as simulated
from rollout_workers.engine.simulated.answers import Answer, AnswerOptions
from rollout_workers.engine.types import SampleRequest
from tests.workers.chat import END, ChatTokenizer

Script = Callable[[SampleRequest, str], str]
"""The text that answers a request whose input is this text."""


def script(monkeypatch: pytest.MonkeyPatch, says: Script) -> list[list[int]]:
    """Have every simulated engine answer with `says`, closed by an end token; returns the inputs as they come."""
    inputs: list[list[int]] = []

    def answer(request: SampleRequest, options: AnswerOptions) -> Answer:
        inputs.append(request.input_ids.tolist())
        text = ChatTokenizer().decode(inputs[-1], skip_special_tokens=False)
        tokens = [*ChatTokenizer().encode(says(request, text)), END]
        cut = np.array(tokens[: request.max_new_tokens], np.int32)
        return Answer(cut, -cut.astype(np.float32) / np.float32(100), "stop" if len(cut) == len(tokens) else "length")

    monkeypatch.setattr(simulated, "answer_to", answer)
    return inputs


def texts(rows: Sequence[Sequence[int]]) -> list[str]:
    return [ChatTokenizer().decode(row, skip_special_tokens=True) for row in rows]


PROMPT = 3
"""Tokens of a prompt of building.task."""


def script_lengths(monkeypatch: pytest.MonkeyPatch, length: Callable[[SampleRequest], int]) -> None:
    """Have every simulated engine answer with so many tokens in all, however often a sample is interrupted.

    A token is its place in the response, and its log-probability that over -1,000.
    """

    def answer(request: SampleRequest, options: AnswerOptions) -> Answer:
        begun = len(request.input_ids) - PROMPT
        end = begun + min(max(length(request) - begun, 1), request.max_new_tokens)
        places = np.arange(begun, end, dtype=np.int32)
        return Answer(places % options.vocab_size, places.astype(np.float32) / np.float32(-1_000), "stop")

    monkeypatch.setattr(simulated, "answer_to", answer)
