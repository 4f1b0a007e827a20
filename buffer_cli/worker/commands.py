"""`rollout-buffer worker` and its options. What it runs is imported when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from buffer_cli.access import with_access
from buffer_cli.options import SERVICE, AddressOption

_ENGINES = "Engines"
_WEIGHTS = "Weights"
_TIMES = "Times, in seconds"


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
        typer.Option("--engine", help="http://host:port of a running server; repeatable.", rich_help_panel=_ENGINES),
    ] = None,
    engine_kind: Annotated[
        str | None, typer.Option(help="What the servers are. Default: sglang.", rich_help_panel=_ENGINES)
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
