"""`rollout-buffer relay` and its options."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import WeightsOptions

_times = partial(typer.Option, rich_help_panel="Times, in seconds")


@runs("buffer_cli.relay.start:run")
def relay(
    upstreams: Annotated[
        list[str],
        typer.Option(
            "--upstream",
            envvar="RB_RELAY_UPSTREAM",
            help="http(s)://host:port of the publisher, or of a relay nearer to it; repeatable, the fastest first.",
        ),
    ],
    weights: WeightsOptions,
    listen: Annotated[
        str, typer.Option(envvar="RB_RELAY_LISTEN", help="host:port at which workers, and other relays, read.")
    ] = "127.0.0.1:8090",
    directory: Annotated[
        Path, typer.Option("--dir", envvar="RB_RELAY_DIR", help="Where files are kept; one relay a directory.")
    ] = Path("relay_weights"),
    max_gb: Annotated[
        float,
        typer.Option(
            envvar="RB_RELAY_MAX_GB",
            help="Most gigabytes (10⁹ bytes) on disk, two versions at least; what was asked for least recently goes.",
        ),
    ] = 200.0,
    patience_s: Annotated[
        float, _times(help="Without a byte from upstream, before those who wait are sent elsewhere.")
    ] = 20.0,
    drain_grace_s: Annotated[float, _times(help="From SIGTERM to the end, for transfers under way.")] = 20.0,
) -> None:
    """Relay weights to the workers of a site: each file comes once, however many ask for it.

    Files are known by their SHA-256, so a relay needs no run and no service, and nobody has to trust it.
    It serves a file while that still comes, and goes on where a connection broke.

    The site's workers are told of it by --weights-mirror https://relay:8090, or all workers by the manifest.
    The token that it sends upstream is the one that it asks for; it needs a certificate then, or RB_INSECURE=1.

    Everybody may read /livez, /readyz and /metrics. SIGTERM and Ctrl-C let transfers end; a second one ends at once.
    """
