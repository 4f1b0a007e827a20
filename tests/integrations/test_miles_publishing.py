"""publish_weights and checkpoint_saved in a process of their own, which shares nothing with the rollout function's."""

from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField, StaleTerm
from tests.integrations.miles_contract import job
from tests.support.push import Pusher, arrays_for
from tests.support.service import ServiceProcess
from trainer_client import BufferClient, Policy
from trainer_client.integrations import miles, slime
from trainer_client.integrations.miles.settings import Settings
from trainer_client.integrations.miles.terms import taken_over

STEPS = 4


def args_of(service: ServiceProcess, client: BufferClient, folder: Path, run_id: str) -> Any:
    """A job whose rollout function, elsewhere, has asked for the first rollouts."""
    client.create_run(run_id, Policy(batch_groups=1, max_queued_groups=STEPS))
    with Pusher(service.address, run_id) as pusher:
        pusher.push(*(arrays_for(f"t{i}") for i in range(STEPS)))
    term = client.resume(run_id).term
    for step in range(STEPS):
        client.pull(run_id, term=term, step=step, timeout_s=10)
    return job(folder, service.address, run_id).args


def test_program_that_was_replaced_changes_nothing_in_its_successors_term(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    args = args_of(service, client, tmp_path, "replaced")
    before = client.run("replaced").term
    assert miles.publish_weights(args, 0) == 1
    assert miles.checkpoint_saved(args, 0) == 1
    # Another program starts from that checkpoint, and this one, which was held up, goes on.
    successor = client.resume("replaced", next_step=1)
    with pytest.raises(StaleTerm) as raised:
        miles.publish_weights(args, 3)
    assert raised.value.attributes == {"term": str(before), "current": str(successor.term)}
    with pytest.raises(StaleTerm):
        miles.publish_weights(args, 0)
    with pytest.raises(StaleTerm):
        miles.checkpoint_saved(args, 3)
    run = client.run("replaced")
    assert (run.term, run.published.version, run.committed_steps) == (successor.term, 1, 1)


def test_process_that_takes_the_run_over_again_publishes_in_its_new_term(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    args = args_of(service, client, tmp_path, "again")
    assert miles.publish_weights(args, 0) == 1
    term = client.resume("again", next_step=1).term
    # As the rollout function does, where it runs in the same process.
    taken_over(Settings.of(args), term)
    assert miles.publish_weights(args, 1) == 2
    assert miles.checkpoint_saved(args, 1) == 2


def written(folder: Path, update: int) -> str:
    """A directory as slime writes one at its update of this number."""
    made = folder / f"weight_v{update:06d}"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    return str(made)


@pytest.mark.parametrize(("interval", "start", "rollouts"), [(1, 0, [0, 1, 2]), (2, 0, [1, 3]), (1, 1, [1, 2])])
def test_slimes_updates_on_disk_are_published_as_of_their_rollouts(
    interval: int, start: int, rollouts: list[int], service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    run_id = f"slime-{interval}-{start}"
    args = args_of(service, client, tmp_path, run_id)
    args.update_weight_mode, args.update_weight_disk_keep_files = "full", True
    args.update_weights_interval, args.start_rollout_id = interval, start
    # Before the training.
    slime.post_write_hook(args, written(tmp_path, 1), [])
    assert client.run(run_id).published.version == 0
    for update, rollout in enumerate(rollouts, start=2):
        slime.post_write_hook(args, written(tmp_path, update), [])
        run = client.run(run_id)
        assert (run.published.version, run.committed_steps) == (update - 1, rollout + 1)


def test_slimes_updates_that_are_no_whole_directories_are_refused(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    args = args_of(service, client, tmp_path, "slime-delta")
    for mode, keep in (("delta", True), ("full", False)):
        args.update_weight_mode, args.update_weight_disk_keep_files = mode, keep
        with pytest.raises(InvalidField, match="update-weight-mode"):
            slime.post_write_hook(args, written(tmp_path, 2 if keep else 3), [])
