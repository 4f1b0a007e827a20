"""Publishing from the training program: weights published, checkpoints reported as safe. Works from any process.

    actor_model.update_weights()                              # train_async.py, as it is
    publish_weights(args, rollout_id, hf_directory)           # ours, the line after it

Miles can do without the line: --custom-megatron-post-save-hook-path trainer_client.integrations.miles.post_save_hook.

Invariants: a call that is repeated for the same rollout changes nothing, so a restarted program may repeat it. A
program that another one has replaced is refused (see `terms`).
"""

from pathlib import Path

from buffer_wire.errors import InvalidField
from trainer_client.client.blocking import BufferClient
from trainer_client.integrations.miles.contract import Args
from trainer_client.integrations.miles.settings import Settings
from trainer_client.integrations.miles.terms import term_of
from trainer_client.manifest import Manifest, manifest_of


def publish_weights(args: Args, rollout_id: int, source: Manifest | Path | str | None = None) -> int:
    """Publish the weights that are trained on every rollout up to `rollout_id`; returns the version.

    `source`: a directory in Hugging Face format, a manifest, or None for engines whose weights somebody else writes.
    Every engine's machine must be able to read the directory, and nobody may change it any more. Raises StaleTerm when
    another program has taken the run over since this process's first call. Raises StepAhead for a rollout that was
    never asked for, VersionConflict, InvalidField.
    """
    settings = Settings.of(args)
    step = settings.step_of(rollout_id)
    with BufferClient(settings.address) as client:
        run = client.run(settings.run_id)
        term = term_of(settings, run.term)
        if run.committed_steps > step:
            return run.published.version
        manifest = manifest_of(Path(source)) if isinstance(source, Path | str) else source
        version = run.published.version + 1
        client.publish(settings.run_id, term=term, version=version, manifest=manifest, commit_through=step)
        return version


def post_save_hook(args: Args, rollout_id: int, checkpoint_dir: str, hf_checkpoint_dir: str | None) -> None:  # noqa: ARG001 - Miles' signature
    """Publish, by `publish_weights`, what --save-hf has written; Miles calls this hook on one rank, after each save.

    Saves between two weight updates publish nothing, and a critic's never. Raises InvalidField without --save-hf.
    """
    if hf_checkpoint_dir is None:
        # Of a model that no engine serves, --save-hf or not.
        if getattr(args, "save_hf", None) is not None:
            return
        raise InvalidField("--save-hf", "", "a directory with {rollout_id} in it, for this hook to publish")
    if (rollout_id + 1) % Settings.of(args).interval == 0:
        publish_weights(args, rollout_id, hf_checkpoint_dir)


def checkpoint_saved(args: Args, rollout_id: int) -> int:
    """Report the trainer's checkpoint of `rollout_id` as safe: data that a restart from it cannot need is freed.

    Returns the steps freed so far. Rollouts whose weights are not published yet are kept. Raises StaleTerm.
    """
    settings = Settings.of(args)
    with BufferClient(settings.address) as client:
        run = client.run(settings.run_id)
        term = term_of(settings, run.term)
        step = min(settings.step_of(rollout_id), run.committed_steps - 1)
        if run.checkpointed_steps > step:
            return run.checkpointed_steps
        return client.checkpoint(settings.run_id, term=term, through_step=step)
