"""The `rollout-buffer bridge` commands and their options. What a command runs is imported when it runs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from buffer_cli.access import with_access
from buffer_cli.options import SERVICE, AddressOption

bridge_app = typer.Typer(
    help="Feed a trainer that is left as it is, over the files that it reads and writes.", no_args_is_help=True
)

_RUN = "The run"
_MICRO = "Micro-batches, as the trainer's configuration says"
_WEIGHTS = "Weights"


@bridge_app.command("prime-rl")
@with_access
def prime_rl(
    run_id: Annotated[str, typer.Option("--run", help="The run whose steps are trained.", rich_help_panel=_RUN)],
    output_dir: Annotated[Path, typer.Option(help="The trainer's output_dir.")],
    seq_len: Annotated[
        int, typer.Option(min=1, help="Most tokens of a micro-batch: model.seq_len.", rich_help_panel=_MICRO)
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function without arguments that gives the run's tasks, from the first one on and in the same order "
            "each time. Default: somebody else submits them.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    batch_groups: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Groups of a step (batch_size / group_size) of a run that is created here, with the preset prime_rl. "
            "Default: the run exists, with any policy (rollout-buffer run create).",
            rich_help_panel=_RUN,
        ),
    ] = None,
    data_ranks: Annotated[
        int, typer.Option(min=1, help="Processes of the trainer / model.cp.", rich_help_panel=_MICRO)
    ] = 1,
    pad_to_multiple_of: Annotated[int, typer.Option(min=1, help="model.cp.", rich_help_panel=_MICRO)] = 1,
    temperature: Annotated[float, typer.Option(help="Of the tasks' sampling.", rich_help_panel=_MICRO)] = 1.0,
    advantage: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Advantages of a group from its rewards and response lengths, as numpy arrays. Default: rewards less "
            "their mean.",
            rich_help_panel=_MICRO,
        ),
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="The trainer's ckpt.output_dir, if it has one.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="The trainer's max_steps. Default: none.")] = None,
    keep_rollouts: Annotated[bool, typer.Option("--keep-rollouts", help="Leave those of trained steps.")] = False,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Where published weights lie. Default: published, below the output_dir.", rich_help_panel=_WEIGHTS
        ),
    ] = None,
    serve: Annotated[
        Literal["path", "http"],
        typer.Option(help="path: engines see this disk; http: they fetch from this process.", rich_help_panel=_WEIGHTS),
    ] = "path",
    host: Annotated[str, typer.Option(help="Address to listen on, for http.", rich_help_panel=_WEIGHTS)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for http. Default: a free one.", rich_help_panel=_WEIGHTS)] = 0,
    advertised_host: Annotated[
        str | None, typer.Option(help="Host under which engines reach it. Default: --host.", rich_help_panel=_WEIGHTS)
    ] = None,
    keep_versions: Annotated[
        int, typer.Option(min=1, help="Newest versions that stay in any case.", rich_help_panel=_WEIGHTS)
    ] = 3,
    address: AddressOption = SERVICE,
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
    given: dict[str, Any] = dict(locals())
    from buffer_cli.bridge.prime_rl import run_prime_rl

    raise typer.Exit(run_prime_rl(given))
