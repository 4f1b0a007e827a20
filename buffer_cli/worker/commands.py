"""`rollout-buffer worker` and its options."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import ServiceOptions, WeightsOptions

_engines = partial(typer.Option, rich_help_panel="Engines")
_weights = partial(typer.Option, rich_help_panel="Weights")
_agents = partial(typer.Option, rich_help_panel="Agents")
_times = partial(typer.Option, rich_help_panel="Times, in seconds")


@runs("buffer_cli.worker.start:run")
def worker(
    run_id: Annotated[str, typer.Option("--run", help="The run to work for; the worker waits until it exists.")],
    service: ServiceOptions,
    weights: WeightsOptions,
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
    agent: Annotated[
        str | None, _agents(help="Agent as module:function, which talks to the model as to OpenAI or Anthropic.")
    ] = None,
    agent_tools: Annotated[str | None, _agents(help="Parser of tool calls: hermes, or sglang:NAME.")] = None,
    agent_reasoning: Annotated[str | None, _agents(help="think: tell <think>…</think> apart from the text.")] = None,
    agent_branches: Annotated[
        str | None, _agents(help="Requests that do not go on from what was said: refuse (default), last, or rows.")
    ] = None,
    agent_listen: Annotated[str | None, _agents(help="host:port of the model. Default: 127.0.0.1:0.")] = None,
    agent_advertise: Annotated[str | None, _agents(help="Host under which agents reach it.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="Stable name. Default: hostname-pid.")] = None,
    groups_per_engine: Annotated[
        int | None, typer.Option(help="Groups whose samples run on each engine at once.")
    ] = None,
    kv_target: Annotated[
        float | None,
        typer.Option(help="Share of the KV cache that samples may take: their limit follows it. 0: fixed."),
    ] = None,
    surplus_samples: Annotated[
        int | None,
        typer.Option(help="Samples that a group begins beyond its size; the last are cut off: prefers short ones."),
    ] = None,
    spread: Annotated[
        bool | None,
        typer.Option("--spread/--no-spread", help="Idle engines take over samples of busy ones. Default: --spread."),
    ] = None,
    max_sample_attempts: Annotated[
        int | None, typer.Option(help="Attempts of one sample before its task goes back.")
    ] = None,
    reward_processes: Annotated[
        int | None, typer.Option(help="Processes for rewards that compute, in place of threads.")
    ] = None,
    reward_threads: Annotated[int | None, typer.Option(help="Threads for rewards that are not coroutines.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer's directory, for chat prompts.")] = None,
    image_root: Annotated[Path | None, typer.Option(help="Directory below which tasks name images by path.")] = None,
    image_hosts: Annotated[
        list[str] | None,
        typer.Option("--image-host", help="host or host:port of images whose addresses are not public; repeatable."),
    ] = None,
    engine_urls: Annotated[
        list[str] | None, _engines("--engine", help="http://host:port of a running server; repeatable.")
    ] = None,
    engine_kind: Annotated[str | None, _engines(help="What the servers are: sglang (default) or vllm.")] = None,
    router: Annotated[str | None, _engines(help="URL of an sglang-router, whose servers are the engines.")] = None,
    launch: Annotated[Path | None, _engines(help="Launch SGLang servers with this model directory.")] = None,
    simulate: Annotated[bool, _engines("--simulate", help="Engines that only keep SGLang's timing.")] = False,
    engines: Annotated[int, _engines(help="Servers to launch, or to simulate.")] = 1,
    sglang_python: Annotated[Path | None, _engines(help="Python of SGLang's environment, for --launch.")] = None,
    device: Annotated[str | None, _engines(help="cpu or cuda, for --launch. Default: cpu.")] = None,
    gpus_per_engine: Annotated[int | None, _engines(help="GPUs of each launched server, out of those visible.")] = None,
    engine_flag: Annotated[list[str] | None, _engines(help="Passed on to SGLang's launch_server; repeatable.")] = None,
    stream: Annotated[
        bool | None,
        _engines(
            "--stream/--no-stream",
            help="Receive tokens as they are made, so that a killed engine costs few. Default: --stream.",
        ),
    ] = None,
    stream_interval: Annotated[int | None, _engines(help="Tokens of a sample between two events of a stream.")] = None,
    sglang_version: Annotated[
        str | None,
        _engines(help="The release that SGLang servers are taken for, whatever they say: for forks and own builds."),
    ] = None,
    breaker_failures: Annotated[
        int | None, _engines(help="Failed calls in a row that cut an engine off from work.")
    ] = None,
    ready_timeout_s: Annotated[float | None, _times(help="Start of a launched server.")] = None,
    log_dir: Annotated[Path | None, _engines(help="Logs of launched servers. Default: weights-dir.")] = None,
    tokens_per_s: Annotated[float | None, _engines(help="Speed of a simulated sample.")] = None,
    vocab_size: Annotated[int | None, _engines(help="Vocabulary of simulated engines.")] = None,
    slots: Annotated[int | None, _engines(help="Samples that a simulated engine decodes at once.")] = None,
    length_median: Annotated[float | None, _engines(help="Median tokens of a simulated response.")] = None,
    length_sigma: Annotated[float | None, _engines(help="Spread of the lengths' logarithm; 0: all equal.")] = None,
    seed: Annotated[int | None, _engines(help="Of simulated engines.")] = None,
    weights_dir: Annotated[Path | None, _weights(help="Where weights are fetched to.")] = None,
    keep_versions: Annotated[int | None, _weights(help="Fetched versions kept on disk.")] = None,
    base_model: Annotated[str | None, _weights(help="Model of version 0. Default: what the engine reports.")] = None,
    weights_serve: Annotated[
        str | None, _weights(help="host:port that serves fetched versions to other workers.")
    ] = None,
    weights_advertise: Annotated[str | None, _weights(help="Host under which they reach it.")] = None,
    weights_prefer_peers: Annotated[
        bool | None,
        _weights("--weights-prefer-peers/--no-weights-prefer-peers", help="Ask other workers before the publisher."),
    ] = None,
    weights_mirrors: Annotated[
        list[str] | None,
        _weights("--weights-mirror", help="URL of a relay, asked before the publisher; repeatable, the fastest first."),
    ] = None,
    pause_mode: Annotated[str | None, _weights(help="retract, in_place or abort.")] = None,
    prefix_cache: Annotated[
        str | None, _weights(help="version (default), or group: what is cached survives a load for groups under way.")
    ] = None,
    evaluations: Annotated[
        str | None, typer.Option(help="Tasks of evaluations: also (default), never, or only.")
    ] = None,
    evaluation_hold_s: Annotated[
        float | None, _times(help="Weights kept for evaluations, though newer are there.")
    ] = None,
    reload_timeout_s: Annotated[float | None, _times(help="Fetch and load of a version.")] = None,
    reward_timeout_s: Annotated[float | None, _times(help="Rewards of one group.")] = None,
    generate_timeout_s: Annotated[float | None, _times(help="Samples of one group.")] = None,
    environment_limits: Annotated[
        list[str] | None,
        _times("--environment-limit", help="NAME.X=VALUE: reward_timeout_s and so on of an environment; repeatable."),
    ] = None,
    lease_wait_s: Annotated[float | None, _times(help="One lease request's wait at the service.")] = None,
    drain_grace_s: Annotated[float | None, _times(help="From SIGTERM to the end.")] = None,
    engine_timeout_s: Annotated[float | None, _times(help="Give up when no engine is ready for so long.")] = None,
    service_timeout_s: Annotated[float | None, _times(help="Give up when the service is away so long.")] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(help="host:port of the worker's own Prometheus metrics; port 0 picks a free one.")
    ] = None,
    progress_every_s: Annotated[float | None, _times(help="Between progress lines; 0 for none.")] = None,
    bundle_bytes: Annotated[int | None, typer.Option(help="Largest push bundle of several groups, in bytes.")] = None,
    direct_payloads: Annotated[
        bool | None,
        typer.Option(
            "--direct-payloads/--no-direct-payloads",
            help="Write large payloads to the store, where the service lets it. Default: --direct-payloads.",
        ),
    ] = None,
) -> None:
    """Generate rollouts: lease tasks, drive engines, score, push, and reload weights in flight (weight sync).

    Name the engines in exactly one way: --engine URL (repeatable), --router URL, --launch MODEL, or --simulate.
    SIGTERM and Ctrl-C drain: partial work is handed back. A second one ends at once.
    """
