"""Application `rollout-buffer`: its commands, put together.

`commands.py` of each folder holds options alone; what a command runs is imported when it runs.
"""

import os
from typing import Annotated

import typer

from buffer_cli.bridge.commands import bridge_app
from buffer_cli.conformance.commands import conformance_app
from buffer_cli.inspect.commands import inspect_app
from buffer_cli.relay.commands import relay
from buffer_cli.run.commands import run_app
from buffer_cli.serve.commands import config_app, serve
from buffer_cli.size.commands import size
from buffer_cli.staleness.commands import lab, plan, simulate, worth
from buffer_cli.status.commands import status
from buffer_cli.token.commands import token_app
from buffer_cli.top.commands import top
from buffer_cli.worker.commands import worker

# Else gRPC remarks on every connection that is ended from the other side, in the midst of what a command prints.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

app = typer.Typer(
    name="rollout-buffer",
    help="A rollout buffer for asynchronous RL of language models: workers push groups, trainers pull batches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(metadata.version("rollout-buffer"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (plan, simulate, lab, worth, size, serve, status, top, worker, relay):
    app.command()(command)
for name, commands in {
    "config": config_app,
    "run": run_app,
    "inspect": inspect_app,
    "token": token_app,
    "bridge": bridge_app,
    "conformance": conformance_app,
}.items():
    app.add_typer(commands, name=name)
