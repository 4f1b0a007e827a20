"""The `rollout-buffer inspect` commands and their options."""

from dataclasses import dataclass
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import CallOptions, JsonOption, RunOption

inspect_app = typer.Typer(
    help="Look into a run: tasks, leases, groups and batches one by one, and who waits on whom.\n\nNothing is changed "
    "by it, and each call to the service is short, whatever the run holds. Needs a token of the role reader, where the "
    "service asks.",
    no_args_is_help=True,
)

TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        envvar="RB_TOKENIZER",
        help="Show text: the model's tokenizer.json, or a directory with it. Needs the extra rollout-buffer[text].",
    ),
]
EnvironmentOption = Annotated[str | None, typer.Option(help='Only of this environment; "" for those that have none.')]


@dataclass(frozen=True)
class PageOptions:
    """Options of a list."""

    limit: Annotated[int, typer.Option(help="Print about so many; 0 for all.")] = 50
    page_token: Annotated[str, typer.Option(help="Go on where a list with --json ended: its next_page_token.")] = ""
    as_json: JsonOption = False


@inspect_app.command()
@runs("buffer_cli.inspect.inspecting:tasks")
def tasks(
    service: CallOptions,
    page: PageOptions,
    run_id: RunOption = None,
    state: Annotated[
        str, typer.Option(help="pending, leased, or ended: failed, or ended with a group that was in no batch.")
    ] = "pending",
    environment: EnvironmentOption = None,
) -> None:
    """List tasks: pending ones in the order of leasing, leased ones, or those that ended in no batch.

    A task that has a group in the queue or in a batch is where its group is: `inspect groups`.
    """


@inspect_app.command()
@runs("buffer_cli.inspect.inspecting:task")
def task(
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    service: CallOptions,
    run_id: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print one task: its attempts, lease and worker, last error, and where its group is."""


@inspect_app.command()
@runs("buffer_cli.inspect.inspecting:leases")
def leases(
    service: CallOptions,
    page: PageOptions,
    run_id: RunOption = None,
    worker_id: Annotated[str, typer.Option("--worker", help="Only those of this worker.")] = "",
    environment: EnvironmentOption = None,
) -> None:
    """List leases: worker, for how long, last heartbeat and expiry. They come in no order.

    `inspect waits` has those that expire first.
    """


@inspect_app.command()
@runs("buffer_cli.inspect.inspecting:groups")
def groups(
    service: CallOptions,
    page: PageOptions,
    run_id: RunOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Those of this step, in place of the queue's.")] = None,
    environment: EnvironmentOption = None,
) -> None:
    """List groups of the queue in order of acceptance, or those of a step: sizes, rewards, versions."""


@inspect_app.command()
@runs("buffer_cli.inspect.inspecting:group")
def group(
    group_id: Annotated[str, typer.Argument(metavar="GROUP", help="The group's id, task_id/incarnation.")],
    service: CallOptions,
    run_id: RunOption = None,
    samples: Annotated[bool, typer.Option("--samples", help="Its samples: lengths, rewards, versions, ends.")] = False,
    tokens_of: Annotated[
        int | None, typer.Option("--tokens", metavar="SAMPLE", min=0, help="Token ids of this sample, from 0.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="The first of these tokens.")] = 0,
    count: Annotated[int, typer.Option(min=1, max=65_536, help="How many of them.")] = 1_024,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print one stored group: who made it, sizes, rewards, versions; its samples; token ids of one sample.

    With --tokenizer the tokens are text, in a colour for each version; underlined is what is not trained on.
    """


@inspect_app.command("wandb")
@runs("buffer_cli.inspect.wandb_table:export")
def wandb(
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="Project of Weights & Biases.")],
    service: CallOptions = CallOptions(timeout_s=60.0),
    run_id: RunOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Groups of this step, in place of the queue's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many groups at most.")] = 32,
    tokenizer_path: TokenizerOption = None,
) -> None:
    """Log samples to a table of Weights & Biases: rewards, versions, prompt and response, and their coloured tokens.

    What the package itself reads decides where that goes, as WANDB_API_KEY and WANDB_MODE=offline. Needs the extra
    rollout-buffer[wandb].
    """


@inspect_app.command()
@runs("buffer_cli.inspect.inspecting:batches")
def batches(service: CallOptions, page: PageOptions = PageOptions(limit=20), run_id: RunOption = None) -> None:
    """List the step that is forming and those that are still stored, newest first: sizes, version, staleness."""


@inspect_app.command()
@runs("buffer_cli.inspect.inspecting:waits")
def waits(
    service: CallOptions,
    run_id: RunOption = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Pushes, leases and workers to name, of each.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Print who waits on whom: the trainer, blocked pushes, workers and the rule that binds them, leases, engines."""
