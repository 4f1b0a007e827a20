"""On-policy distillation: what the teacher's server is asked and answers, and the step that the student makes of it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from aiohttp import web

from examples.demo import vocabulary
from examples.demo.model import build_model
from examples.distill import teacher
from examples.distill.__main__ import train_step
from rollout_workers.rewards import RewardInput
from trainer_client.collate import PaddedBatch
from trainer_client.objectives import selected_logprobs

ANSWER = vocabulary.encode("7")


def sample(**more: Any) -> RewardInput:
    return RewardInput(
        task_id="t",
        environment="",
        metadata={"answer": "7"},
        sample_index=0,
        prompt_ids=np.array(vocabulary.encode("3+4="), np.int32),
        response_ids=np.array([*ANSWER, vocabulary.EOS_ID], np.int32),
        finish_reason="stop",
        text=None,
        **more,
    )


@pytest_asyncio.fixture
async def asked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Any]]:
    """Bodies of the questions to a server with SGLang's answers: −1 for each token, of the last 7 at most."""
    seen: list[Any] = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        entries = [[None if i == 0 else -1.0, token, None] for i, token in enumerate(body["input_ids"])]
        return web.json_response({"meta_info": {"input_token_logprobs": entries[-7:]}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("TEACHER_URL", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setattr(teacher, "_session", None)
    yield seen
    if teacher._session is not None:
        await teacher._session.close()
    await runner.cleanup()


async def test_the_teacher_is_asked_about_the_students_tokens(asked: list[Any]) -> None:
    given = await teacher.reward(sample())
    assert given["reward"] == 1.0
    assert np.array_equal(given["teacher_logprobs"], np.array([-1, -1], np.float32))  # type: ignore[arg-type]
    assert asked[0]["input_ids"] == [*vocabulary.encode("3+4="), *ANSWER, vocabulary.EOS_ID]
    assert (asked[0]["sampling_params"]["max_new_tokens"], asked[0]["logprob_start_len"]) == (0, 0)


async def test_an_answer_about_other_tokens_is_refused(asked: list[Any]) -> None:
    longer = replace(sample(), response_ids=np.array([*ANSWER] * 9, np.int32))
    with pytest.raises(ValueError, match="other tokens than the 9"):
        await teacher.reward(longer)


def batch(teacher_logprobs: torch.Tensor, logprobs: torch.Tensor, ids: torch.Tensor) -> PaddedBatch:
    mask = torch.tensor([[False] * 3 + [True] * 2])
    one = torch.zeros(1, dtype=torch.int64)
    return PaddedBatch(
        token_ids=ids,
        position_ids=torch.arange(5)[None],
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        logprobs=logprobs,
        versions=one[None],
        rewards=torch.ones(1),
        group_index=one,
        sample_index=one,
        trajectory_index=one,
        policy_index=one,
        trajectory_loss_tokens=one + 2,
        prompt_len=one,
        lengths=one,
        staleness=one,
        extras={"teacher_logprobs": teacher_logprobs},
        step=0,
        train_version=1,
        total_groups=1,
        total_samples=1,
        total_trajectories=1,
        total_tokens=5,
        total_loss_tokens=2,
    )


@pytest.mark.parametrize("likes", [-1.0, 1.0])
def test_a_step_moves_the_student_to_where_the_teacher_is(likes: float) -> None:
    model = build_model(0)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before = selected_logprobs(model(input_ids=ids).logits, ids)
    # Of the two tokens it likes one more than the student does, and the other less.
    liked = torch.tensor([[0.0, 0.0, 0.0, likes + 0.5, 0.5 - likes]])
    figures = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch(before + liked, before, ids))
    assert figures["reverse_kl"] == pytest.approx(-0.5, abs=1e-5)
    with torch.no_grad():
        after = selected_logprobs(model(input_ids=ids).logits, ids)
    moved = (after - before)[0]
    assert ((moved[3] - moved[4]) * likes).item() > 0
