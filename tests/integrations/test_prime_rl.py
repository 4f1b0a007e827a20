"""Micro-batches as PRIME-RL's trainer takes them, weights tagged by step, and the settings that are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_wire.codec import Delivered, join_group
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2
from tests.support.push import Extra, GroupArrays, SampleArrays
from trainer_client.batch import Batch, BatchInfo, Group
from trainer_client.integrations.prime_rl import PrimeRLConfig, PrimeRLData, PrimeRLWeights, StepPublisher
from trainer_client.integrations.prime_rl_packing import Packing, group_advantages, pack, to_tensors
from trainer_client.manifest import FilesManifest
from trainer_client.publication import Publication


def group(*rewards: float, lengths: tuple[int, ...], prompt_len: int = 2, experts: bool = False) -> Group:
    """Samples of `lengths` tokens, token t of sample i being 100 i + t."""
    samples = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        mask = (np.arange(length) >= prompt_len).astype(np.uint8)
        samples.append(
            SampleArrays(
                token_ids=np.arange(100 * i, 100 * i + length, dtype=np.int32),
                logprobs=-0.25 * mask.astype(np.float32) * (i + 1),
                loss_mask=mask,
                prompt_len=prompt_len,
                reward=reward,
                spans=[(1, 0, prompt_len, length)],
            )
        )
    extras = {}
    if experts:
        routed = [np.full((length, 2, 1), i, np.uint8) for i, length in enumerate(lengths)]
        extras = {"routed_experts": Extra(axis=groups_pb2.AXIS_TOKEN, arrays=routed)}
    arrays = GroupArrays(task_id="t", samples=samples, extras=extras)
    return Group.of(Delivered(b"".join(join_group(*arrays.to_wire())), 1, 0, 0), 0)


def batch_of(*groups: Group) -> Batch:
    return Batch(BatchInfo(0, 0, len(groups), 0, 0, 0, len(groups), 0, 0.0, 0, False, 0, 0.0), groups, 0)


def test_rollouts_are_packed_longest_first_where_they_fit_first() -> None:
    packed = pack(batch_of(group(0, 1, lengths=(5, 9)), group(1, 0, lengths=(4, 3))), Packing(seq_len=12))
    assert [len(each.token_ids) for each in packed] == [12, 9]
    assert packed[0].token_ids.tolist() == [*range(100, 109), *range(100, 103)]
    assert packed[0].position_ids.tolist() == [*range(9), *range(3)]
    assert packed[1].position_ids.tolist() == [*range(5), *range(4)]
    assert packed[1].loss_mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert packed[1].logprobs.tolist() == [0, 0, -0.25, -0.25, -0.25, 0, 0, -0.25, -0.25]


def test_advantage_is_the_reward_less_the_groups_mean() -> None:
    [packed] = pack(batch_of(group(0, 1, lengths=(3, 4)), group(2, 2, lengths=(3, 3))), Packing(seq_len=64))
    assert packed.advantages.tolist() == [0.5] * 4 + [-0.5] * 3 + [0.0] * 6


def test_advantage_of_ones_own_sees_rewards_and_response_lengths() -> None:
    seen: list[Any] = []

    def advantage(rewards: Any, lengths: Any) -> Any:
        seen.append((rewards.tolist(), lengths.tolist()))
        return rewards * 2

    assert group_advantages(group(1, 3, lengths=(4, 7)), advantage).tolist() == [2, 6]
    assert seen == [([1, 3], [2, 5])]
    with pytest.raises(InvalidField, match="advantage"):
        group_advantages(group(1, 3, lengths=(4, 7)), lambda rewards, _: rewards[:1])


def test_micro_batches_are_padded_without_loss() -> None:
    [packed] = pack(batch_of(group(0, 1, lengths=(3, 4))), Packing(seq_len=16, pad_to_multiple_of=4, temperature=0.5))
    assert len(packed.token_ids) == 8
    assert packed.token_ids[7:].tolist() == [1]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert packed.temperatures.tolist() == [0.5] * 7 + [1.0]
    assert (packed.loss_mask[7], packed.advantages[7], packed.logprobs[7]) == (False, 0.0, 0.0)


def test_rollout_longer_than_the_budget_is_cut() -> None:
    packed = pack(batch_of(group(0, 1, lengths=(20, 3))), Packing(seq_len=8))
    assert [each.token_ids.tolist() for each in packed] == [list(range(8)), [100, 101, 102]]


def test_temperature_can_be_each_groups_own() -> None:
    packing = Packing(seq_len=64, temperature=lambda group: len(group.samples) / 10)
    [packed] = pack(batch_of(group(0, 1, lengths=(3, 3)), group(0, lengths=(3,))), packing)
    np.testing.assert_allclose(packed.temperatures, [0.2] * 6 + [0.1] * 3, rtol=1e-6)


def test_routed_experts_are_replayed_where_every_rollout_has_them() -> None:
    packing = Packing(seq_len=64, pad_to_multiple_of=8)
    [packed] = pack(batch_of(group(0, 1, lengths=(3, 4), experts=True)), packing)
    assert packed.routed_experts is not None
    assert packed.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert packed.routed_experts.shape == (8, 2, 1)
    mixed = batch_of(group(0, 1, lengths=(3, 4), experts=True), group(0, lengths=(3,)))
    assert pack(mixed, packing)[0].routed_experts is None


def test_tensors_have_the_trainers_shapes_and_dtypes() -> None:
    torch = pytest.importorskip("torch")
    [packed] = pack(batch_of(group(0, 1, lengths=(3, 4), experts=True)), Packing(seq_len=64))
    tensors: Any = to_tensors(packed)
    token_level = {
        "input_ids": torch.int64,
        "position_ids": torch.int64,
        "advantages": torch.float32,
        "inference_logprobs": torch.float32,
        "loss_mask": torch.bool,
        "temperatures": torch.float32,
    }
    assert {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in token_level} == {
        name: (dtype, (1, 7)) for name, dtype in token_level.items()
    }
    assert (tensors["lora_num_tokens"].tolist(), tensors["lora_num_tokens"].dtype) == ([7], torch.int32)
    assert (tensors["routed_experts"].dtype, tuple(tensors["routed_experts"].shape)) == (torch.int32, (1, 7, 2, 1))
    assert [tensors[name] for name in ("teacher_logprobs", "pixel_values", "image_grid_thw")] == [None] * 3


def test_a_rank_with_fewer_micro_batches_gets_more_without_loss() -> None:
    pytest.importorskip("torch")
    session: Any = iter([batch_of(group(0, 1, lengths=(3, 4)))])
    data = PrimeRLData(session, Packing(seq_len=8, pad_to_multiple_of=2), lambda count: count + 2)
    with pytest.raises(InvalidField, match="wait_for_batch"):
        data.get_batch()
    data.wait_for_batch()
    micro_batches = data.get_batch()
    assert [micro["input_ids"].shape[1] for micro in micro_batches] == [8, 2, 2]
    assert [int(micro["loss_mask"].sum()) for micro in micro_batches] == [3, 0, 0]


def test_end_of_the_tasks_is_said() -> None:
    class Ended:
        next_step = 4

        def __next__(self) -> Batch:
            raise StopIteration

    ended: Any = Ended()
    with pytest.raises(EOFError, match="no rollouts for step 4"):
        PrimeRLData(ended, Packing(seq_len=8), int).wait_for_batch()


def test_policy_is_published_at_its_own_step_and_once() -> None:
    published: list[int] = []
    checkpoints: list[str] = []
    session: Any = SimpleNamespace(
        next_step=3,
        version=2,
        publish=lambda _, version: published.append(version),
        checkpoint=lambda: checkpoints.append("done"),
    )
    weights = PrimeRLWeights(session)
    with pytest.raises(InvalidField, match="step"):
        weights.broadcast_weights(None, step=2)
    weights.broadcast_weights(None, step=3)
    session.version = 3
    # As after a resume, whose policy is there already.
    weights.broadcast_weights(None, step=3)
    weights.maybe_clean(2, interval_to_keep=None)
    assert published == [3]
    with pytest.raises(InvalidField, match="step"):
        weights.checkpointed(step=4)
    weights.checkpointed(step=3)
    assert checkpoints == ["done"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch_size": 9}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"rollouts_per_example": 0}, "rollouts_per_example"),
        ({"seq_len": 0}, "seq_len"),
        ({"seq_len": 30}, "seq_len"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"max_async_level": -1}, "max_async_level"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, int], field: str) -> None:
    settings = {"batch_size": 8, "rollouts_per_example": 4, "seq_len": 32, "pad_to_multiple_of": 4}
    assert PrimeRLConfig(**settings).policy().batch_groups == 2  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=field):
        PrimeRLConfig(**{**settings, **changes})  # type: ignore[arg-type]


def test_policy_is_the_preset_with_the_levels() -> None:
    settings = {"batch_size": 8, "rollouts_per_example": 4, "seq_len": 32}
    assert PrimeRLConfig(**settings).policy().preset == "prime_rl(2)"  # type: ignore[arg-type]
    config = PrimeRLConfig(**settings, max_async_level=1, max_off_policy_steps=8)  # type: ignore[arg-type]
    policy = config.policy(failure_budget=3)
    assert (policy.preset, policy.failure_budget) == ("prime_rl(1,8)", 3)


# ── weights by step ──────────────────────────────────────────────────────────


def offer(publisher: StepPublisher, step: int, content: str, epoch: int = 1) -> FilesManifest:
    def save(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(content)
        (folder / "config.json").write_text("{}")

    client: Any = None
    manifest = publisher.offer(save, Publication(client, "r", epoch, step))
    publisher.published(manifest, committed_steps=step)
    return manifest


def test_published_weights_are_tagged_by_step(tmp_path: Path) -> None:
    publisher = StepPublisher(tmp_path)
    manifest = offer(publisher, 1, "one")
    tag = tmp_path / "weights" / "step_1"
    assert sorted(path.relative_to(tag).as_posix() for path in tag.rglob("*")) == [
        "STABLE", "config.json", "model", "model/weights",
    ]  # fmt: skip
    assert (tag / "model" / "weights").read_text() == "one"
    assert {file.name for file in manifest.files} == {"config.json", "model/weights"}
    assert manifest.base_url.startswith(str(tmp_path / "broadcasts"))


def test_tags_go_with_their_versions_but_for_the_interval(tmp_path: Path) -> None:
    publisher = StepPublisher(tmp_path, keep=2, interval_to_keep=3)
    for step in range(1, 8):
        offer(publisher, step, f"step {step}")
    assert publisher.steps == [1, 2, 3, 4, 5, 6, 7]
    publisher.checkpointed(7)
    assert publisher.versions == [6, 7]
    assert publisher.steps == [3, 6, 7]
    assert (tmp_path / "weights" / "step_3" / "model" / "weights").read_text() == "step 3"


def test_step_that_is_published_again_after_a_resume_replaces_its_tag(tmp_path: Path) -> None:
    offer(StepPublisher(tmp_path), 1, "before")
    again = StepPublisher(tmp_path)
    again.resumed(0)
    offer(again, 1, "after", epoch=2)
    tag = tmp_path / "weights" / "step_1"
    assert ((tag / "model" / "weights").read_text(), (tag / "STABLE").exists()) == ("after", True)


def test_offer_that_was_not_published_is_not_tagged(tmp_path: Path) -> None:
    publisher = StepPublisher(tmp_path)
    client: Any = None
    publisher.offer(lambda folder: (folder / "x").write_text("x"), Publication(client, "r", 1, 1))
    assert publisher.steps == []
    with pytest.raises(InvalidField, match="interval_to_keep"):
        StepPublisher(tmp_path, interval_to_keep=0)
