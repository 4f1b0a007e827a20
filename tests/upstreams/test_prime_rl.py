"""PRIME-RL's own code reads what the bridge writes: structs, transport, data loader, packing, loss, configuration.

All of it runs on a CPU. What does not: its models, and the weight broadcast, which needs torchtitan.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.docs.pages import shell_words
from tests.integrations.prime_rl_bridge import Carried, groups_of_step
from tests.integrations.prime_rl_trainer import FileTrainer, decode, group_of
from tests.support.push import PushingWorker
from tests.support.service import ServiceProcess
from tests.support.upstreams import needs
from trainer_client import BufferClient
from trainer_client.batch import Group
from trainer_client.integrations.prime_rl import Packing, encode, pack
from trainer_client.integrations.prime_rl.output_dir import OutputDir
from trainer_client.integrations.prime_rl.wire import FIELDS, ROUTED_EXPERTS_FIELDS
from trainer_client.objectives import ipo_loss

pytestmark = needs("prime_rl")

EXAMPLE = Path(__file__).parents[2] / "examples" / "prime_rl"


def groups(*, experts: bool = False) -> list[Group]:
    rng = np.random.default_rng(7)
    return [
        group_of(0, 1, lengths=[int(n) for n in rng.integers(3, 30, 2)], environment=f"env{i % 2}", experts=experts)
        for i in range(9)
    ]


def samples_of(found: list[Group], temperature: float) -> list[Any]:
    """Make the same rollouts as its orchestrator hands them to its packing."""
    from prime_rl.transports.rollouts import RoutedExperts, TrainingSample

    samples = []
    for group in found:
        mean = sum(group.rewards.tolist()) / len(group.samples)
        for sample in group.samples:
            experts = sample.extras.get("routed_experts")
            samples.append(
                TrainingSample(
                    token_ids=sample.token_ids.tolist(),
                    mask=[bool(one) for one in sample.loss_mask],
                    logprobs=sample.logprobs.tolist(),
                    temperatures=[temperature] * sample.tokens,
                    env_name=group.environment,
                    advantages=[sample.reward - mean] * sample.tokens,
                    routed_experts=None
                    if experts is None
                    else RoutedExperts(data=experts.tobytes(), shape=list(experts.shape), dtype=str(experts.dtype)),
                )
            )
    return samples


def read(content: bytes) -> list[Any]:
    import msgspec
    from prime_rl.transports.rollouts import MicroBatch

    found: list[Any] = msgspec.msgpack.Decoder(type=list[MicroBatch]).decode(content)
    return found


def test_documented_layout_is_that_of_its_structs() -> None:
    from prime_rl.transports.rollouts import MicroBatch, RoutedExperts

    assert MicroBatch.__struct_fields__ == FIELDS
    assert RoutedExperts.__struct_fields__ == ROUTED_EXPERTS_FIELDS
    assert MicroBatch.__struct_config__.array_like
    assert RoutedExperts.__struct_config__.array_like
    # As many at the end as may be left out.
    assert len(MicroBatch.__struct_defaults__) == len(FIELDS) - FIELDS.index("ref_logprobs")


def test_directories_are_where_it_looks(tmp_path: Path) -> None:
    from prime_rl.utils import pathing

    output = OutputDir(tmp_path)
    output.write_rollouts(3, [b""])
    assert (pathing.get_step_path(pathing.get_rollout_dir(tmp_path), 3) / "rank_0.bin").exists()
    assert output.stable(3) == pathing.get_step_path(pathing.get_broadcast_dir(tmp_path), 3) / "STABLE"
    whole = pathing.get_step_path(pathing.get_ckpt_dir(tmp_path), 3) / "trainer"
    whole.mkdir(parents=True)
    (whole / ".metadata").touch()
    assert output.checkpointed(5) == 3


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 8])
def test_micro_batches_of_one_rank_are_those_of_its_own_packing(experts: bool, multiple_of: int) -> None:
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch

    found = groups(experts=experts)
    packing = Packing(seq_len=64, pad_to_multiple_of=multiple_of, temperature=0.5)
    [ours] = pack(found, packing)
    [theirs] = prepare_batch(samples_of(found, 0.5), 64, 1, build_bin_cost(None), multiple_of)
    assert sorted(read(encode(ours)), key=str) == sorted(theirs, key=str)
    assert len(ours) > 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_micro_batches_of_ranks_hold_what_its_own_packing_gives_them(ranks: int) -> None:
    from prime_rl.trainer.batch import _assert_token_arrays_aligned, build_bin_cost, prepare_batch

    found = groups()
    ours = [read(encode(share)) for share in pack(found, Packing(seq_len=64, data_ranks=ranks, pad_to_multiple_of=4))]
    theirs = prepare_batch(samples_of(found, 1.0), 64, ranks, build_bin_cost(None), 4)
    assert [len(share) for share in ours] == [len(share) for share in theirs]
    for micro in itertools.chain(*ours):
        _assert_token_arrays_aligned(micro)

    def trained(shares: Any) -> list[tuple[Any, ...]]:
        tokens = []
        for micro in itertools.chain(*shares):
            columns = zip(micro.input_ids, micro.advantages, micro.inference_logprobs, micro.env_names, strict=True)
            tokens += [values for values, counts in zip(columns, micro.loss_mask, strict=True) if counts]
        return sorted(tokens)

    assert trained(ours) == trained(theirs)


def test_its_loss_runs_over_what_its_loader_makes_of_the_file(tmp_path: Path, rank: Any) -> None:
    from prime_rl.configs.trainer import DefaultLossConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    columns = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
    found = [group_of(0, 1, lengths=(9, 12)), group_of(0, 1, lengths=(7, 5), columns=columns)]
    OutputDir(tmp_path).write_rollouts(1, [encode(share) for share in pack(found, Packing(seq_len=64))])
    loader = rank(tmp_path, 0, 1, start_step=1)
    loader.wait_for_batch()
    [micro] = loader.get_batch()
    lengths = micro["sequence_lengths"]
    assert micro["seq_lens"].tolist() == lengths == [12, 9, 7, 5]
    assert micro["env_names"] == ["math"] * 33
    logprobs = torch.full((1, 33), -0.5, requires_grad=True)
    scales = [int((micro["loss_mask"] & (micro["rl_weights"] != 0)).sum())]
    scales += [int((micro[name] != 0).sum()) for name in ("ce_weights", "ref_kl_weights")]
    per_token = {
        name: micro[name].squeeze().split(lengths)
        for name in ("inference_logprobs", "ref_logprobs", "advantages", "loss_mask", *columns[1:])
    }
    loss, metrics = compute_loss(
        trainer_logprobs=torch.split(logprobs.squeeze(), lengths),
        rl_loss_fn=setup_rl_loss_fn(DefaultLossConfig()),
        rl_scale=scales[0],
        ce_scale=scales[1],
        ref_kl_scale=scales[2],
        **per_token,
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum() > 0
    assert {"is_masked", "nll", "ref_kl"} <= set(metrics)


@pytest.mark.parametrize("by_sign", [False, True], ids=["ipo", "default"])
def test_its_losses_are_those_of_objectives(by_sign: bool) -> None:
    from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig
    from prime_rl.trainer.rl.loss import LossInputs, default_loss_fn, ipo_loss_fn

    torch.manual_seed(3)
    theirs_logprobs = (-torch.rand(500, dtype=torch.float64) * 3).requires_grad_()
    ours_logprobs = theirs_logprobs.detach().clone().requires_grad_()
    behaviour = theirs_logprobs.detach() + torch.randn(500, dtype=torch.float64) * 0.5
    advantages, mask = torch.randn(500, dtype=torch.float64), torch.rand(500) < 0.8
    inputs = LossInputs(theirs_logprobs, behaviour, None, advantages, mask)
    if by_sign:
        theirs = default_loss_fn(inputs, DefaultLossConfig(kl_tau=0.01)).loss
        ours = ipo_loss(ours_logprobs, behaviour, advantages, mask, kl=0.01, by_sign=True, loss_tokens=1)
    else:
        theirs = ipo_loss_fn(inputs, IPOLossConfig(ipo_threshold=0.1)).loss
        ours = ipo_loss(ours_logprobs, behaviour, advantages, mask, mask_low=0.1, mask_high=0.1, loss_tokens=1)
    torch.testing.assert_close(ours, theirs)
    [gradient] = torch.autograd.grad(theirs, theirs_logprobs)
    torch.testing.assert_close(torch.autograd.grad(ours, ours_logprobs)[0], gradient)


def test_its_loaders_train_a_run_step_by_step(
    service: ServiceProcess, client: BufferClient, tmp_path: Path, rank: Any
) -> None:
    with (
        Carried(client, "upstream", tmp_path, ranks=2, max_steps=3) as carried,
        PushingWorker(service.address, "upstream"),
    ):
        trainer = FileTrainer(tmp_path, ranks=2)
        loaders = [rank(tmp_path, each, 2, start_step=1) for each in range(2)]
        for step in range(1, 4):
            batches = []
            for loader in loaders:
                loader.wait_for_batch()
                batches.append(loader.get_batch())
            tokens = sum(int(micro["loss_mask"].sum()) for micro in itertools.chain(*batches))
            by_layout = [decode((tmp_path / f"rollouts/step_{step}/rank_{i}.bin").read_bytes()) for i in range(2)]
            assert [[micro["input_ids"].tolist()[0] for micro in share] for share in batches] == [
                [micro["input_ids"] for micro in share] for share in by_layout
            ]
            assert tokens <= sum(map(len, groups_of_step(client, "upstream", step - 1)))
            trainer.finish()
        carried.join()
    assert client.run("upstream").committed_steps == 3


def test_its_trainer_reads_the_launch_scripts_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl.utils.config import cli

    script = (
        (EXAMPLE / "launch.sh").read_text().replace("$here", str(EXAMPLE)).replace("${RESUME:+--resume}", "--resume")
    )
    [command] = [words for words in shell_words(script) if "prime_rl.trainer.rl.train" in words]
    monkeypatch.setattr(sys, "argv", command[command.index("prime_rl.trainer.rl.train") :])
    config = cli(TrainerConfig)
    assert config.rollout_transport.type == config.weight_broadcast.type == "filesystem"
    assert (config.model.seq_len, config.model.cp, config.max_steps, config.model.lora) == (4096, 1, 200, None)
    assert config.resume is not None


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its data loader as one of its processes makes it."""
    from prime_rl.configs.shared import FileSystemTransportConfig
    from prime_rl.trainer.rl.data import DataLoader
    from prime_rl.trainer.world import reset_world

    def loader(root: Path, rank: int, ranks: int, *, start_step: int) -> Any:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        reset_world()
        return DataLoader(root, start_step, ranks, FileSystemTransportConfig())

    yield loader
    reset_world()
