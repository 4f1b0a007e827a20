"""Sharded weights over two gloo ranks: whole and exact for every publisher, one tensor at a time, and together."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from buffer_wire.errors import InvalidField
from tests.fsdp.ranks import Ranks, running_ranks
from tests.fsdp.scenarios import BIG_SHAPE, BIG_TENSORS, model, publication
from tests.support.service import ServiceProcess
from trainer_client.publish import FilesPublisher, ShardedWeights, TensorsPublisher
from trainer_client.publish.sharded import published_by

pytestmark = pytest.mark.timeout(300)  # two processes import torch

SCENARIOS = "tests.fsdp.scenarios:"
DEADLINE_S = 40.0
"""Deadline for a failure to reach the other rank; generous for a busy machine, and far below the group's own timeout.
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with running_ranks(2, tmp_path_factory.mktemp("ranks")) as running:
        running.call(SCENARIOS + "warms_up")
        yield running


def check_exact(directory: Path) -> None:
    """Check that what is stored is the unsharded model, bit for bit, under its names."""
    stored = load_file(directory / "model.safetensors")
    expected = model().state_dict()
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor), name


# ── values ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("publish", ["publishes_files", "publishes_by_value", "publishes_files_of_ddp"])
def test_what_is_published_is_the_unsharded_model_bit_for_bit(ranks: Ranks, tmp_path: Path, publish: str) -> None:
    zero, one = ranks.call(SCENARIOS + publish, directory=str(tmp_path))
    assert one.result is None
    assert zero.result["files"] == ["model.safetensors"]
    check_exact(Path(zero.result["directory"]))


def test_an_engine_receives_whole_tensors_at_every_update(ranks: Ranks) -> None:
    zero, _ = ranks.call(SCENARIOS + "publishes_to_an_engine")
    first, second = zero.result
    for name, tensor in model().state_dict().items():
        whole = tensor.float()
        assert first[name] == float(whole.double().sum())
        changed = tensor.is_floating_point()
        assert second[name] == float(((tensor + 1).float() if changed else whole).double().sum())


@pytest.mark.parametrize("leader", [0, 1])
def test_floating_point_is_cast_on_request_and_any_rank_may_lead(ranks: Ranks, tmp_path: Path, leader: int) -> None:
    outcomes = ranks.call(SCENARIOS + "casts", directory=str(tmp_path), leader=leader)
    assert outcomes[1 - leader].result == []
    expected = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in model().state_dict().items()
    }
    assert outcomes[leader].result == [str(tensor.dtype).removeprefix("torch.") for tensor in expected.values()]

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    for name, tensor in expected.items():
        with safe_open(tmp_path / index["weight_map"][name], "pt") as stored:
            assert torch.equal(stored.get_tensor(name), tensor)


def test_other_placements_and_whole_tensors_come_out_right(ranks: Ranks) -> None:
    zero, one = ranks.call(SCENARIOS + "other_layouts")
    assert zero.result == [True, True, True]
    assert one.result == []


def test_shards_of_the_older_kind_are_gathered(ranks: Ranks) -> None:
    zero, _ = ranks.call(SCENARIOS + "legacy_shards")
    assert zero.result is True


# ── memory ───────────────────────────────────────────────────────────────────


def test_peak_memory_is_near_one_tensor(ranks: Ranks, tmp_path: Path) -> None:
    tensor_mb = BIG_SHAPE[0] * BIG_SHAPE[1] * 4 / 1e6
    peaks = [outcome.result for outcome in ranks.call(SCENARIOS + "peak_of_a_large_model", directory=str(tmp_path))]
    print(f"\npeaks over {BIG_TENSORS} tensors of {tensor_mb:.0f} MB: {peaks} MB")
    assert all(peak < 1.5 * tensor_mb for peak in peaks), peaks


# ── failures ─────────────────────────────────────────────────────────────────


def test_a_full_disk_on_rank_0_is_raised_on_all_and_the_next_publish_works(ranks: Ranks, tmp_path: Path) -> None:
    zero, one = ranks.call(SCENARIOS + "disk_full", directory=str(tmp_path))
    assert zero.error == "OSError"
    assert one.error == "PublishFailed"
    assert f"rank 0 could not publish: OSError: {zero.message}" in one.message
    assert max(zero.after_s, one.after_s) < DEADLINE_S
    assert list(tmp_path.iterdir()) == []

    again, _ = ranks.call(SCENARIOS + "publishes_files", directory=str(tmp_path))
    check_exact(Path(again.result["directory"]))


def test_the_projects_own_errors_are_the_same_on_all_ranks(ranks: Ranks) -> None:
    zero, one = ranks.call(SCENARIOS + "refused_by_the_service")
    assert zero.error == one.error == "VersionConflict"
    assert zero.message == one.message


def test_engines_that_lag_are_rank_0s_business_and_the_version_is_everybodys(
    ranks: Ranks, service: ServiceProcess, run_id: str, tmp_path: Path
) -> None:
    outcomes = ranks.call(
        SCENARIOS + "lagging_engines", address=service.address, run_id=run_id, directory=str(tmp_path)
    )
    assert [outcome.result for outcome in outcomes] == [[1, "NotReady"], [1, ""]]


def test_ranks_that_hold_other_tensors_are_told_so(ranks: Ranks) -> None:
    for outcome in ranks.call(SCENARIOS + "different_models"):
        assert outcome.error == "InvalidField"
        assert "on ranks [1] as on rank 0" in outcome.message


def test_a_rank_that_cannot_read_its_part_is_named_on_the_others(ranks: Ranks) -> None:
    zero, one = ranks.call(SCENARIOS + "unreadable_on_one")
    assert (one.error, one.message) == ("OSError", "rank 1 cannot read its shard")
    assert zero.error == "PublishFailed"
    assert "rank 1 cannot take part" in zero.message


@pytest.mark.parametrize("leaders", [[], [0, 1]])
def test_exactly_one_rank_leads(ranks: Ranks, leaders: list[int]) -> None:
    for outcome in ranks.call(SCENARIOS + "led_by", leaders=leaders):
        assert outcome.error == "InvalidField"
        assert f"leads is 'true on ranks {leaders}'" in outcome.message


def test_what_the_caller_has_begun_is_not_begun_again(ranks: Ranks, tmp_path: Path) -> None:
    assert [outcome.result for outcome in ranks.call(SCENARIOS + "nested", directory=str(tmp_path))] == [True, True]


@pytest.mark.faults
@pytest.mark.parametrize("dying", [0, 1])
def test_a_killed_rank_ends_the_others_wait(tmp_path: Path, dying: int) -> None:
    with running_ranks(2, tmp_path) as own:
        own.call(SCENARIOS + "warms_up")
        outcomes = own.call(SCENARIOS + "killed_while_gathering", dying=dying)
    assert outcomes[dying].error == "gone"
    left = outcomes[1 - dying]
    assert left.error == "PublishFailed"
    assert f"the process group failed on rank {1 - dying}" in left.message
    assert left.after_s < DEADLINE_S


def test_a_leader_that_stands_still_is_left_after_the_groups_timeout(ranks: Ranks) -> None:
    zero, one = ranks.call(SCENARIOS + "stands_still", for_s=8.0, group_timeout_s=2.0)
    assert zero.after_s >= 8.0
    assert one.error == "PublishFailed"
    assert "waiting for rank 0, which publishes" in one.message
    assert one.after_s < 8.0


# ── one process ──────────────────────────────────────────────────────────────


def test_what_is_not_sharded_is_published_as_it_is() -> None:
    for source in (None, "/a/directory", {"w": torch.zeros(1)}, torch.nn.Linear(1, 1)):
        for leads in (True, False):
            with published_by(source, leads=leads) as given:
                assert given is source


def test_sharded_weights_are_published_within_a_gathering_only(tmp_path: Path) -> None:
    weights = ShardedWeights({"w": torch.zeros(1)})
    files = FilesPublisher(tmp_path)
    for publisher in (files, TensorsPublisher(files)):
        with pytest.raises(InvalidField, match="by the rank that leads"):
            publisher.offer(weights, publication())
    with pytest.raises(InvalidField, match="init_process_group"), weights.gathering(leads=True):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", [None, "/a/directory", 3])
def test_other_sources_are_refused_by_name(source: object) -> None:
    with pytest.raises(InvalidField) as raised:
        ShardedWeights(source)  # type: ignore[arg-type]
    assert raised.value.attributes["field"] == "source"


def test_integers_are_nothing_to_cast_to() -> None:
    with pytest.raises(InvalidField, match="floating-point"):
        ShardedWeights({}, dtype=torch.int8)
