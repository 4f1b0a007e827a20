"""The `rollout-buffer inspect` commands and their options. What a command runs is imported when it runs."""

from typing import Annotated

import typer

from buffer_cli.access import with_access
from buffer_cli.options import SERVICE, AddressOption, JsonOption, TimeoutOption

inspect_app = typer.Typer(
    help="Look into a run: tasks, leases, groups and batches one by one, and who waits on whom.\n\nNothing is changed "
    "by it, and each call to the service is short, whatever the run holds. Needs a token of the role reader, where the "
    "service asks.",
    no_args_is_help=True,
)

RunOption = Annotated[str | None, typer.Option("--run", help="May be left out where there is only one.")]
EnvironmentOption = Annotated[str | None, typer.Option(help='Only of this environment; "" for those that have none.')]
LimitOption = Annotated[int, typer.Option(help="Print about so many; 0 for all.")]
TokenOption = Annotated[str, typer.Option(help="Go on where a list with --json ended: its next_page_token.")]


@inspect_app.command()
@with_access
def tasks(
    run_id: RunOption = None,
    state: Annotated[
        str, typer.Option(help="pending, leased, or ended: failed, or ended with a group that was in no batch.")
    ] = "pending",
    environment: EnvironmentOption = None,
    limit: LimitOption = 50,
    page_token: TokenOption = "",
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """List tasks: pending ones in the order of leasing, leased ones, or those that ended in no batch.

    A task that has a group in the queue or in a batch is where its group is: `inspect groups`.
    """
    from buffer_cli.inspect import inspecting

    raise typer.Exit(
        inspecting.perform(
            address,
            timeout_s,
            run_id,
            lambda calls, run: inspecting.tasks(
                calls, run, state, environment, "", limit=limit, token=page_token, as_json=as_json
            ),
        )
    )


@inspect_app.command()
@with_access
def task(
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    run_id: RunOption = None,
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """Print one task: its attempts, lease and worker, last error, and where its group is."""
    from buffer_cli.inspect import inspecting

    raise typer.Exit(
        inspecting.perform(
            address, timeout_s, run_id, lambda calls, run: inspecting.task(calls, run, task_id, as_json=as_json)
        )
    )


@inspect_app.command()
@with_access
def leases(
    run_id: RunOption = None,
    worker_id: Annotated[str, typer.Option("--worker", help="Only those of this worker.")] = "",
    environment: EnvironmentOption = None,
    limit: LimitOption = 50,
    page_token: TokenOption = "",
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """List leases: worker, for how long, last heartbeat and expiry. They come in no order.

    `inspect waits` has those that expire first.
    """
    from buffer_cli.inspect import inspecting

    raise typer.Exit(
        inspecting.perform(
            address,
            timeout_s,
            run_id,
            lambda calls, run: inspecting.tasks(
                calls, run, "leased", environment, worker_id, limit=limit, token=page_token, as_json=as_json
            ),
        )
    )


@inspect_app.command()
@with_access
def groups(
    run_id: RunOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Those of this step, in place of the queue's.")] = None,
    environment: EnvironmentOption = None,
    limit: LimitOption = 50,
    page_token: TokenOption = "",
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """List groups of the queue in order of acceptance, or those of a step: sizes, rewards, versions."""
    from buffer_cli.inspect import inspecting

    raise typer.Exit(
        inspecting.perform(
            address,
            timeout_s,
            run_id,
            lambda calls, run: inspecting.groups(
                calls, run, step, environment, limit=limit, token=page_token, as_json=as_json
            ),
        )
    )


@inspect_app.command()
@with_access
def group(
    group_id: Annotated[str, typer.Argument(metavar="GROUP", help="The group's id, task_id/generation.")],
    run_id: RunOption = None,
    samples: Annotated[bool, typer.Option("--samples", help="Its samples: lengths, rewards, versions, ends.")] = False,
    tokens_of: Annotated[
        int | None, typer.Option("--tokens", metavar="SAMPLE", min=0, help="Token ids of this sample, from 0.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="The first of these tokens.")] = 0,
    count: Annotated[int, typer.Option(min=1, max=65_536, help="How many of them.")] = 1_024,
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """Print one stored group: who made it, sizes, rewards, versions; its samples; token ids of one sample."""
    from buffer_cli.inspect import inspecting

    raise typer.Exit(
        inspecting.perform(
            address,
            timeout_s,
            run_id,
            lambda calls, run: inspecting.group(
                calls, run, group_id, samples=samples, tokens_of=tokens_of, first=first, count=count, as_json=as_json
            ),
        )
    )


@inspect_app.command()
@with_access
def batches(
    run_id: RunOption = None,
    limit: LimitOption = 20,
    page_token: TokenOption = "",
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """List the step that is forming and those that are still stored, newest first: sizes, version, staleness."""
    from buffer_cli.inspect import inspecting

    raise typer.Exit(
        inspecting.perform(
            address,
            timeout_s,
            run_id,
            lambda calls, run: inspecting.batches(calls, run, limit=limit, token=page_token, as_json=as_json),
        )
    )


@inspect_app.command()
@with_access
def waits(
    run_id: RunOption = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Pushes, leases and workers to name, of each.")] = 20,
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """Print who waits on whom: the trainer, blocked pushes, workers and the rule that binds them, leases, engines."""
    from buffer_cli.inspect import inspecting

    raise typer.Exit(
        inspecting.perform(
            address, timeout_s, run_id, lambda calls, run: inspecting.waits(calls, run, limit=limit, as_json=as_json)
        )
    )
