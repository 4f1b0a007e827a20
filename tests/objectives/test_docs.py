"""The page on objectives: its code runs as it stands, on a real service, with groups and a model of a real engine."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.support.recorded_groups import ReplayWorker, recorded_tasks, write_recorded_model
from tests.support.service import running_service
from trainer_client import Batch, BufferClient, Policy
from trainer_client.collate import collate
from trainer_client.objectives import gspo_loss, rloo_advantages, selected_logprobs
from trainer_client.publish import FilesPublisher
from trainer_client.session.session import TrainerSession

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"


class TwoSteps:
    """A session whose loops end after two steps each."""

    def __init__(self, session: TrainerSession) -> None:
        self._session = session

    def __iter__(self) -> Iterator[Batch]:
        return islice(self._session, 2)

    def micro_batches(self) -> Iterator[Batch]:
        final = 0
        for micro in self._session.micro_batches():
            yield micro
            final += micro.final
            if final == 2:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def examples() -> list[str]:
    """The page's Python, block by block, without what wants a sampling mask: the recorded groups have none."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [block for block in blocks if "sampling_mask" not in block]


@pytest.mark.timeout(300)
def test_the_pages_examples_run_in_order(tmp_path: Path) -> None:
    blocks = examples()
    assert len(blocks) == 7
    model = Qwen3ForCausalLM.from_pretrained(write_recorded_model(tmp_path / "model"), dtype=torch.float32)
    policy = Policy(batch_groups=4, micro_batch_groups=2, overflow_action="block")
    with (
        running_service(tmp_path) as service,
        ReplayWorker(service.address, "page"),
        BufferClient(service.address) as client,
        FilesPublisher(tmp_path / "weights") as publisher,
        client.session("page", policy=policy, tasks=recorded_tasks(40), publisher=publisher) as session,
    ):
        names: dict[str, Any] = {
            "session": TwoSteps(session),
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        }
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
            if "pack(groups)" in block:
                check_packed(model, names)
        assert session.version == 4, "two steps whole, two steps streamed"
    batch = names["batch"]
    assert batch.total_loss_tokens == batch.loss_mask.sum()
    assert names["metrics"].keys() >= {"kl", "ratio/min", "ratio/max", "masked"}
    assert 0.0 <= names["metrics"]["masked"] <= 1.0


def check_packed(model: Qwen3ForCausalLM, names: dict[str, Any]) -> None:
    """The page's packed log-probabilities and loss are those of the same groups in rows."""
    rows = collate(names["groups"])
    with torch.no_grad():
        logits = model(input_ids=rows.token_ids, attention_mask=rows.attention_mask).logits
    logprobs = selected_logprobs(logits, rows.token_ids)
    advantages = rloo_advantages(rows.rewards, rows.group_index.bincount())
    loss = gspo_loss(logprobs, rows.logprobs, advantages, rows.loss_mask, total_samples=rows.total_samples)
    torch.testing.assert_close(names["loss"].detach(), loss, rtol=0, atol=1e-5)
    packed = names["logprobs"].detach()[names["packed"].loss_mask]
    torch.testing.assert_close(packed, logprobs[rows.loss_mask], rtol=0, atol=1e-4)
