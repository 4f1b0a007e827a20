"""The `rollout-buffer bridge` commands and their options."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from buffer_cli.command import runs
from buffer_cli.options import ServiceOptions

bridge_app = typer.Typer(
    help="Feed a trainer that is left as it is, over the files that it reads and writes.", no_args_is_help=True
)

_run = partial(typer.Option, rich_help_panel="The run")
_micro = partial(typer.Option, rich_help_panel="Micro-batches, as the trainer's configuration says")
_weights = partial(typer.Option, rich_help_panel="Weights")


@bridge_app.command("prime-rl")
@runs("buffer_cli.bridge.prime_rl:run_prime_rl")
def prime_rl(
    run_id: Annotated[str, _run("--run", help="The run whose steps are trained.")],
    output_dir: Annotated[Path, typer.Option(help="The trainer's output_dir.")],
    seq_len: Annotated[int, _micro(min=1, help="Most tokens of a micro-batch: model.seq_len.")],
    service: ServiceOptions,
    tasks: Annotated[
        str | None,
        _run(
            metavar="MODULE:FUNCTION",
            help="Function without arguments that gives the run's tasks, from the first one on and in the same order "
            "each time. Default: somebody else submits them.",
        ),
    ] = None,
    batch_groups: Annotated[
        int | None,
        _run(
            min=1,
            help="Groups of a step (batch_size / group_size) of a run that is created here, with the preset prime_rl. "
            "Default: the run exists, with any policy (rollout-buffer run create).",
        ),
    ] = None,
    data_ranks: Annotated[int, _micro(min=1, help="Processes of the trainer / model.cp.")] = 1,
    pad_to_multiple_of: Annotated[int, _micro(min=1, help="model.cp.")] = 1,
    temperature: Annotated[float, _micro(help="Of the tasks' sampling.")] = 1.0,
    advantage: Annotated[
        str | None,
        _micro(
            metavar="MODULE:FUNCTION",
            help="Advantages of a group from its rewards and response lengths, as numpy arrays. Default: rewards less "
            "their mean.",
        ),
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="The trainer's ckpt.output_dir, if it has one.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="The trainer's max_steps. Default: none.")] = None,
    keep_rollouts: Annotated[bool, typer.Option("--keep-rollouts", help="Leave those of trained steps.")] = False,
    weights: Annotated[
        Path | None, _weights(help="Where published weights lie. Default: published, below the output_dir.")
    ] = None,
    serve: Annotated[
        Literal["path", "http"], _weights(help="path: engines see this disk; http: they fetch from this process.")
    ] = "path",
    host: Annotated[str, _weights(help="Address to listen on, for http.")] = "127.0.0.1",
    port: Annotated[int, _weights(help="Port for http. Default: a free one.")] = 0,
    advertised_host: Annotated[str | None, _weights(help="Host under which engines reach it. Default: --host.")] = None,
    keep_versions: Annotated[int, _weights(min=1, help="Newest versions that stay in any case.")] = 3,
) -> None:
    """Feed PRIME-RL's own trainer (`uv run trainer`) from a run, in place of its orchestrator.

    Writes the rollouts of step N to OUTPUT_DIR/rollouts/step_N. When the trainer has called
    OUTPUT_DIR/broadcasts/step_N stable, it is published to the run's workers as version N. Step N of the trainer is
    step N - 1 of the run.

    The trainer's configuration needs rollout_transport.type and weight_broadcast.type "filesystem", and no LoRA.

    Bridge and trainer may be killed and started again, in any order: every step is trained on the rollouts that it had.
    Says on whom it waits. SIGTERM and Ctrl-C end it between two pieces of work; the run goes on.

    Example: rollout-buffer bridge prime-rl --run math --batch-groups 32 --tasks my_tasks:tasks --output-dir outputs
    --seq-len 8192 --data-ranks 4
    """
