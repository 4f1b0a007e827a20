"""The `rollout-buffer token` commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import JsonOption

token_app = typer.Typer(
    help="Make, list and revoke the tokens that let workers, trainers and readers into a service.\n\nThe service is "
    "started with the same file (--tokens-file) and takes changes over within a second.",
    no_args_is_help=True,
)

FileOption = Annotated[
    Path,
    typer.Option("--tokens-file", envvar="RB_TOKENS_FILE", help="The service's tokens file; holds hashes, no secrets."),
]


@token_app.command()
@runs("buffer_cli.token.tokens:create")
def create(
    tokens_file: FileOption,
    role: Annotated[str, typer.Option(help="worker, trainer, reader or admin.")],
    runs: Annotated[list[str], typer.Option("--run", help="A run, or the beginning of its name and *; repeatable.")],
    token_id: Annotated[
        str | None, typer.Option("--id", help="Public name of the token. Default: a random one.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="Good for so many days. Default: until it is revoked.")] = None,
    to: Annotated[
        Path | None, typer.Option(help="Write the token to this new file, for its owner alone, and do not print it.")
    ] = None,
) -> None:
    """Make a token and print it: the only time that it is shown.

    Example: rollout-buffer token create --tokens-file tokens.jsonl --role worker --run 'math-*' --to worker.token
    """


@token_app.command("list")
@runs("buffer_cli.token.tokens:list_tokens")
def list_(tokens_file: FileOption, as_json: JsonOption = False) -> None:
    """List the tokens of a file: id, role, runs and end. Secrets are not in it."""


@token_app.command()
@runs("buffer_cli.token.tokens:revoke")
def revoke(
    tokens_file: FileOption, token_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")]
) -> None:
    """Take a token out of the file: services refuse it within a second, streams that use it end."""
