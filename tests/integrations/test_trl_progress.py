"""Tests of when a trainer publishes, checkpoints and where it would go on, beside transformers' loop and a stand-in
session.
"""

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, BatchInfo
from trainer_client.integrations.trl_progress import RolloutBufferCallback
from trainer_client.session.session import TrainerSession


class Session:
    """Remembers what it is told."""

    run_id = "r"

    def __init__(self, next_step: int, batches_per_publish: int = 1, steps: int = 100) -> None:
        self.next_step = next_step
        self.version = next_step
        self.policy = SimpleNamespace(batches_per_publish=batches_per_publish)
        self.steps = steps
        self.told: list[str] = []

    def __next__(self) -> Batch:
        if self.next_step == self.steps:
            raise StopIteration
        self.next_step += 1
        info = BatchInfo(
            step=self.next_step - 1, train_version=0, total_groups=1, total_samples=1, total_tokens=1,
            total_loss_tokens=1, shard_groups=1, shard_tokens=1, staleness_mean=0.0, staleness_max=0, replayed=False,
            queued_groups=0, waited_s=0.0,
        )  # fmt: skip
        return Batch(info=info, groups=(), received_bytes=0)

    def metrics(self, *, timeout_s: float) -> dict[str, float]:
        assert timeout_s < 1
        return {"rollout_buffer/step": self.next_step - 1}

    def publish(self, source: object) -> None:
        self.told.append(f"publish {source} of {self.next_step}")

    def checkpoint(self) -> None:
        self.told.append(f"checkpoint {self.next_step}")

    def commit(self) -> None:
        self.told.append(f"commit {self.next_step}")


class Loop:
    """Calls the callback as transformers does."""

    def __init__(self, *, optimizer_steps: int = 1, global_step: int = 0, saved: int | None = None, **of: int) -> None:
        self.opened: list[int] = []
        self.closed = False

        @contextlib.contextmanager
        def opening(next_step: int) -> Iterator[TrainerSession]:
            self.opened.append(next_step)
            self.session = Session(next_step, **of)
            yield cast("TrainerSession", self.session)
            self.closed = True

        self.callback = RolloutBufferCallback(opening, lambda: "weights", optimizer_steps)
        self.state = TrainerState(global_step=global_step)
        if saved is not None:
            self.state.stateful_callbacks = cast(
                "Any", {"RolloutBufferCallback": {"args": {}, "attributes": {"next_step": saved}}}
            )

    def call(self, event: str) -> None:
        getattr(self.callback, event)(cast("TrainingArguments", None), self.state, TrainerControl())

    def step(self, pulls: int = 1) -> None:
        for _ in range(pulls):
            self.callback.pull()
        self.state.global_step += 1
        self.call("on_step_end")

    @property
    def saved(self) -> int:
        return self.callback.state()["attributes"]["next_step"]


def test_every_step_is_published_and_checkpointed_where_one_ends() -> None:
    loop = Loop()
    assert loop.saved == 0
    loop.call("on_train_begin")
    assert (loop.opened, loop.saved) == ([0], 0)
    loop.step()
    loop.call("on_save")
    assert loop.saved == 1
    loop.step()
    loop.call("on_train_end")
    assert loop.session.told == ["publish weights of 1", "checkpoint 1", "publish weights of 2", "commit 2"]
    loop.callback.close()
    assert loop.closed
    assert loop.callback.session is None


def test_a_step_of_several_optimizer_steps_is_published_after_the_last(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(optimizer_steps=2)
    loop.call("on_train_begin")
    loop.step()
    with caplog.at_level(logging.WARNING, "trainer_client"):
        loop.call("on_save")
    # The batch is half in the weights: a resume trains on it from its start.
    assert (loop.saved, loop.session.told) == (0, [])
    assert "checkpoint-1 lies inside step 0 of run r" in caplog.text
    loop.step(pulls=0)
    assert (loop.saved, loop.session.told) == (1, ["publish weights of 1"])
    loop.call("on_save")
    assert loop.session.told[-1] == "checkpoint 1"
    loop.step()
    loop.call("on_train_end")
    assert loop.session.told[-1] == "checkpoint 1"


def test_an_optimizer_step_of_several_batches_is_published_once() -> None:
    loop = Loop(batches_per_publish=2)
    loop.call("on_train_begin")
    loop.step(pulls=2)
    loop.step(pulls=2)
    assert loop.session.told == ["publish weights of 2", "publish weights of 4"]
    assert loop.saved == 4


def test_the_policy_makes_publishes_rarer_than_steps() -> None:
    loop = Loop(batches_per_publish=3, global_step=5, saved=5)
    loop.call("on_train_begin")
    for _ in range(7):
        loop.step()
    loop.call("on_train_end")
    assert loop.session.told == ["publish weights of 8", "publish weights of 11", "commit 12"]


def test_a_resume_goes_on_with_the_steps_in_the_weights() -> None:
    loop = Loop(optimizer_steps=2, global_step=9, saved=4)
    loop.call("on_train_begin")
    assert (loop.opened, loop.saved) == ([4], 4)
    # Whatever a fresh state says, training from nothing begins with step 0.
    fresh = Loop(saved=4)
    fresh.call("on_train_begin")
    assert fresh.opened == [0]


def test_a_checkpoint_that_says_no_step_is_refused() -> None:
    loop = Loop(global_step=3)
    with pytest.raises(InvalidField, match=r"checkpoint-3.*BufferGRPOTrainer"):
        loop.call("on_train_begin")
    assert loop.opened == []


def test_batches_are_to_be_had_inside_of_train_and_while_there_are_any() -> None:
    loop = Loop(steps=1)
    with pytest.raises(InvalidField, match=r"inside of train\(\)"):
        loop.callback.pull()
    loop.call("on_train_begin")
    loop.step()
    with pytest.raises(InvalidField, match=r"^state of run r"):
        loop.callback.pull()


def test_what_is_logged_are_the_metrics_of_the_session() -> None:
    loop = Loop()
    assert loop.callback.metrics() == {}
    loop.call("on_train_begin")
    loop.step()
    assert loop.callback.metrics() == {"rollout_buffer/step": 0}
    loop.callback.close()
    assert loop.callback.metrics() == {}
