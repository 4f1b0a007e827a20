"""Options of a rollout worker: one frozen value, checked when it is made, that every part reads and none changes.

Invariant: exactly one source of engines is named (URLs, a router, launch, or simulated), and their kind has it.
"""

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from buffer_wire import limits
from buffer_wire.connection.access import Access, check_address, stays_here
from buffer_wire.errors import InvalidField
from buffer_wire.images.reading import ImageRules
from rollout_workers.engine.options import LaunchOptions, SimulatedOptions, Source, check, is_positive
from rollout_workers.engine.registry import KINDS, SERVERS, Kind
from rollout_workers.engine.types import PauseMode, PrefixCache

EVALUATIONS = ("also", "never", "only")
"""Choices for evaluations: a worker takes their tasks beside the training's, never, or only them."""

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_LISTEN = re.compile(r"(?:[A-Za-z0-9._-]{0,200}|\[[0-9A-Fa-f:]+\]):([0-9]{1,5})")
_LISTENS = "host:port, with a port from 0 to 65535"
_BASE_URL = re.compile(r"https?://[^\s/?#]{1,200}(/[^\s?#]*)?")
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_TOOLS = re.compile(r"|hermes|sglang:[A-Za-z0-9._-]{1,100}")
_REWARD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_listen(address: str) -> bool:
    """True for host:port at which something can listen; the host may be empty."""
    found = _LISTEN.fullmatch(address)
    return found is not None and int(found[1]) <= 65_535


def is_base_url(url: str) -> bool:
    """True for an http(s) URL to which paths can be appended."""
    return bool(_BASE_URL.fullmatch(url)) and limits.is_http_url(url)


def default_worker_id() -> str:
    """`hostname-pid`, reduced to the characters that a worker id may have."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    return f"{host or 'worker'}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """An agent that makes the samples by requests to the model, and how it is served. Raises InvalidField."""

    function: str
    """`module:function`, see rollout_workers.agents.rollout."""

    tools: str = ""
    """Parser of tool calls: `hermes`, or `sglang:NAME` for one of the server's own. Default: tools are refused."""

    reasoning: str = ""
    """`think`: what stands between <think> and </think> is told apart from the text. Default: it is text."""

    branches: str = "refuse"
    """Way with a request that does not go on from what was said: `refuse` fails the sample; `last` goes on from the
    last answer in common, and what is behind it is discarded; `rows` begins a further row of the sample."""

    listen: str = "127.0.0.1:0"
    """host:port at which agents reach the model; port 0: any free one. Beyond this machine with RB_INSECURE=1 alone,
    for an episode's key goes there in plain text."""

    advertise: str = ""
    """Host that agents are told. Default: that of `listen`."""

    def __post_init__(self) -> None:
        check("agent", self.function, lambda f: bool(_REWARD.fullmatch(f)), "module:function")
        check("agent_tools", self.tools, lambda t: bool(_TOOLS.fullmatch(t)), "hermes or sglang:NAME")
        check("agent_reasoning", self.reasoning, lambda r: r in {"", "think"}, "think")
        check("agent_branches", self.branches, lambda b: b in {"refuse", "last", "rows"}, "refuse, last or rows")
        check("agent_listen", self.listen, is_listen, _LISTENS)
        check("agent_advertise", self.advertise, lambda a: not a or bool(_HOST.fullmatch(a)), "a host name")
        if not (stays_here(self.listen) or Access().effective().insecure):
            raise InvalidField(
                "agent_listen", self.listen, "this machine's own, or with RB_INSECURE=1: keys in plain text"
            )


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Everything a worker is told. Durations are seconds. Raises InvalidField."""

    address: str
    """Address of the service, host:port."""

    run_id: str
    """The run to work for; the worker waits until it exists."""

    access: Access = field(default_factory=Access)
    """Token and TLS; what is unset comes from the environment."""

    reward: str = ""
    """`module:function`, loaded once; its signature is documented in rollout_workers.rewards. Required unless a rollout
    function, an environment or an agent gives the rewards."""

    rollout: str = ""
    """`module:function` that makes a sample out of many turns, see rollout_workers.functions. Default: one turn."""

    environment: str = ""
    """`verifiers:NAME`: the environment makes the samples and their rewards."""

    environment_args: str = ""
    """Arguments of the environment, a JSON object."""

    agent: AgentOptions | None = None
    """Agent that makes the samples. Default: none."""

    engine_kind: str = "sglang"
    """Kind of the engines that are servers."""

    engine_urls: tuple[str, ...] = ()
    """Base URLs (http://host:port) of running servers, one engine each."""

    router: str = ""
    """Base URL of an sglang-router: the SGLang servers that it lists are the engines, followed as they come and go."""

    launch: LaunchOptions | None = None

    simulated: SimulatedOptions | None = None

    sglang_version: str = ""
    """The release that SGLang servers are taken for, whatever they say: for forks and builds without tags."""

    worker_id: str = field(default_factory=default_worker_id)
    """Name of the worker, 1 to 100 characters of [A-Za-z0-9._:-]; a restarted worker of the same name releases its old
    leases at once."""

    stream: bool = True
    """Have SGLang send tokens as they are made, so that an engine that dies costs only the last few of each sample."""

    stream_interval: int = 16
    """Tokens of a sample between two events of its stream, 1 to 4,096."""

    breaker_failures: int = 5
    """Failed calls in a row after which an engine gets no work until a trial succeeds, 1 to 1,000."""

    groups_per_engine: int = 8
    """Groups whose samples run on each engine at once, 1 to 256. A sample that has ended makes room for others, though
    its group goes on."""

    kv_target: float = 0.0
    """Share of an engine's KV cache that samples may take before fewer run, 0 to 1. With it, `groups_per_engine` is
    where the limit begins, and the engine's own limit of requests the most. 0 (default): the limit stays."""

    surplus_samples: int = 0
    """Samples that a group begins beyond its size, 0 to 256. The first that end make the group; what still runs then is
    thrown away, which prefers short responses. 0 (default): none."""

    spread: bool = True
    """Have an idle engine of the worker take over samples of a busy one, where they end sooner there."""

    reward_timeout_s: float = 60.0
    """Longest time for the rewards of one group; of one sample where the function is a coroutine."""

    reward_threads: int = 4
    """Threads for reward functions that are not coroutines, 1 to 256."""

    reward_processes: int = 0
    """Processes for reward functions that compute, in place of threads, 0 to 256; 0: threads."""

    weights_dir: Path = Path("worker_weights")
    """Directory to which weights are fetched, one subdirectory a version. Workers on one host may share it."""

    keep_versions: int = 2
    """Fetched versions kept on disk, 1 to 1,000; a loaded one is never deleted by its own worker."""

    base_model: str | None = None
    """Model that belongs to version 0, as the engine would load it. Default: the launched model, or what the engine
    reports at the start."""

    tokenizer: str | None = None
    """Directory of the tokenizer for prompts given as chat messages. Default: the launched model, or what the engine
    reports. Needs the package transformers; tasks with token ids need none. Its config.json tells the shape of routed
    experts where the path that an engine reports is another machine's."""

    image_root: Path | None = None
    """Directory below which tasks may name images by path. Default: they may not."""

    image_hosts: tuple[str, ...] = ()
    """Hosts, as "host" or "host:port", of which tasks may name images by URL whatever their addresses are. Other hosts
    must have public addresses only."""

    weights_serve: str = ""
    """host:port at which fetched versions are served to other workers of the run, read-only; port 0: any free one.
    Empty (default): none. Without a token (`weights_access`): loopback, or a network that only workers reach."""

    weights_advertise: str = ""
    """Host name or address under which other workers reach `weights_serve`. Default: its host; the machine's name where
    that is a wildcard."""

    weights_prefer_peers: bool = False
    """Ask other workers that have a version before its publisher, which is then spared."""

    weights_mirrors: tuple[str, ...] = ()
    """Base URLs of relays that may have the weights. They are asked before the publisher, the fastest first."""

    weights_max_mbps: float = 0.0
    """Most megabits a second that all downloads of weights take together; 0: no limit."""

    weights_access: Access = field(default_factory=Access)
    """Token and authorities of those who serve weights, and the token that `weights_serve` asks for; what is unset
    comes from RB_WEIGHTS_TOKEN or RB_WEIGHTS_TOKEN_FILE, and RB_WEIGHTS_TLS_CA."""

    weights_tls_cert: str | Path = ""
    """PEM file with the certificate of `weights_serve`; RB_WEIGHTS_TLS_CERT where it is unset; none: plain http."""

    weights_tls_key: str | Path = ""
    """PEM file with its key; RB_WEIGHTS_TLS_KEY where it is unset."""

    pause_mode: str = "retract"
    """`retract` (running requests are recomputed), `in_place` (they go on over the old cache), `abort` (they come back
    as partial rollouts)."""

    prefix_cache: str = "version"
    """`version` (requests go on with keys and values of the present weights alone), `group` (with all since the version
    that their group was begun with: loads leave the engines' prefix caches alone, and log-probabilities are less
    exact)."""

    reload_timeout_s: float = 120.0
    """Longest time to fetch and load a version before the engine is quarantined."""

    evaluations: str = "also"
    """`also` (tasks of evaluations come first, on the same engines), `never`, or `only` (no training: the engines load
    whatever version is evaluated)."""

    evaluation_hold_s: float = 600.0
    """Longest time for which an engine keeps its weights, although newer ones are published, to finish evaluations."""

    lease_wait_s: float = 10.0
    """Longest wait of one lease request at the service, 0 to 60."""

    drain_grace_s: float = 20.0
    """Time from the first SIGTERM to the end: partial work is collected and handed back, finished groups are pushed."""

    service_timeout_s: float = 900.0
    """Time after which the worker ends with an error when the service, or the run, was not to be reached."""

    generate_timeout_s: float = 1_800.0
    """Longest time for the samples of one group on an engine; what is unfinished then has failed once, and goes on."""

    max_sample_attempts: int = 3
    """Attempts of one sample under one lease, 1 to 100, failed generations and rewards counted together. A sample that
    fails is tried again alone; when it is given up, the task goes back with its siblings."""

    environment_limits: tuple[str, ...] = ()
    """Limits of an environment's tasks in place of the worker's, each `NAME.X=VALUE`, X one of generate_timeout_s,
    reward_timeout_s and max_sample_attempts. A task's own come before them."""

    engine_timeout_s: float = 300.0
    """Longest wait for an engine that was given by URL to be ready at the start; the worker ends with an error when all
    its engines were lost for so long."""

    metrics_listen: str = ""
    """host:port of the worker's own `/metrics`, for everybody who reaches it; port 0: any free one. Empty (default):
    none."""

    progress_every_s: float = 10.0
    """Interval of the progress lines; 0 turns them off."""

    bundle_bytes: int = 4 << 20
    """Largest size in bytes of a push bundle of several groups; a group above it goes alone."""

    direct_payloads: bool = True
    """Write the payloads of large groups to the store, where the service gives access to it. False: the service relays
    all of them."""

    def __post_init__(self) -> None:
        check_address(self.address)
        check("run_id", self.run_id, lambda r: bool(limits.RUN_ID.fullmatch(r)), "1 to 64 of [A-Za-z0-9._-]")
        self._check_functions()
        check("worker_id", self.worker_id, lambda w: bool(_NAME.fullmatch(w)), "1 to 100 of [A-Za-z0-9._:-]")
        check("groups_per_engine", self.groups_per_engine, lambda n: 1 <= n <= 256, "1 to 256")
        check("surplus_samples", self.surplus_samples, lambda n: 0 <= n <= 256, "0 to 256")
        check("kv_target", self.kv_target, lambda share: 0 <= share <= 1, "0 to 1")
        check("stream_interval", self.stream_interval, lambda n: 1 <= n <= 4_096, "1 to 4,096")
        check("breaker_failures", self.breaker_failures, lambda n: 1 <= n <= 1_000, "1 to 1,000")
        check("reward_processes", self.reward_processes, lambda n: 0 <= n <= 256, "0 to 256")
        check("reward_threads", self.reward_threads, lambda n: 1 <= n <= 256, "1 to 256")
        check("max_sample_attempts", self.max_sample_attempts, lambda n: 1 <= n <= 100, "1 to 100")
        check("keep_versions", self.keep_versions, lambda n: 1 <= n <= 1_000, "1 to 1,000")
        check("pause_mode", self.pause_mode, lambda m: m in list(PauseMode), f"one of {', '.join(PauseMode)}")
        check("prefix_cache", self.prefix_cache, lambda c: c in list(PrefixCache), f"one of {', '.join(PrefixCache)}")
        if self.evaluations == "only":
            # Its engines go back to older weights, under whose labels there is what newer ones have computed.
            check(
                "prefix_cache", self.prefix_cache, lambda c: c == PrefixCache.VERSION, "version with evaluations only"
            )
        check("evaluations", self.evaluations, lambda m: m in EVALUATIONS, f"one of {', '.join(EVALUATIONS)}")
        check("weights_serve", self.weights_serve, lambda a: not a or is_listen(a), _LISTENS)
        check("metrics_listen", self.metrics_listen, lambda a: not a or is_listen(a), _LISTENS)
        check("weights_advertise", self.weights_advertise, lambda a: not a or bool(_HOST.fullmatch(a)), "a host name")
        check("weights_max_mbps", self.weights_max_mbps, lambda n: 0 <= n <= 1e6, "0 to 1,000,000 Mbit/s")
        for host in self.image_hosts:
            check("image_hosts", host, lambda h: bool(_HOST.fullmatch(h)), "host or host:port")
        for mirror in self.weights_mirrors:
            check("weights_mirrors", mirror, is_base_url, "http://host:port or https://host:port")
        check("lease_wait_s", self.lease_wait_s, lambda s: 0 <= s <= 60, "0 to 60 seconds")
        check("progress_every_s", self.progress_every_s, lambda s: 0 <= s <= 86_400, "0 to 86,400 seconds")
        check("bundle_bytes", self.bundle_bytes, lambda n: 1 <= n <= 32 << 20, "1 to 33,554,432 bytes")
        for name in (
            "reward_timeout_s",
            "reload_timeout_s",
            "drain_grace_s",
            "service_timeout_s",
            "generate_timeout_s",
            "engine_timeout_s",
            "evaluation_hold_s",
        ):
            check(name, getattr(self, name), is_positive, "a finite number of seconds above 0")
        for url in (*self.engine_urls, *([self.router] if self.router else [])):
            check("engine_urls", url, lambda u: u.startswith(("http://", "https://")), "http://host:port")
        sources = [bool(self.engine_urls), bool(self.router), self.launch is not None, self.simulated is not None]
        if sum(sources) != 1:
            raise InvalidField(
                "engines",
                f"{sum(sources)} sources",
                "one of engine_urls (--engine), router, launch and simulated (--simulate)",
            )
        check("engine_kind", self.engine_kind, lambda k: k in SERVERS, f"one of {', '.join(SERVERS)}")
        self.kind.check(self)

    def _check_functions(self) -> None:
        if self.rollout and self.environment:
            raise InvalidField("environment", self.environment, "not given together with a rollout function")
        if self.agent is not None and (self.rollout or self.environment):
            raise InvalidField("agent", self.agent.function, "not given together with another rollout")
        if self.environment_args and not self.environment:
            raise InvalidField("environment_args", self.environment_args, "given together with environment")
        if self.reward or not (self.rollout or self.environment or self.agent):
            check("reward", self.reward, lambda r: bool(_REWARD.fullmatch(r)), "module:function")
        elif self.reward_processes:
            raise InvalidField("reward_processes", self.reward_processes, "0 without a reward function")
        if self.rollout:
            check("rollout", self.rollout, lambda r: bool(_REWARD.fullmatch(r)), "module:function")
        if self.environment:
            check("environment", self.environment, lambda e: e.startswith("verifiers:"), "verifiers:NAME")

    @property
    def kind(self) -> Kind:
        """Kind of the worker's engines."""
        return KINDS["simulated" if self.simulated is not None else self.engine_kind]

    @property
    def image_rules(self) -> ImageRules:
        """Rules of which images may be read."""
        return ImageRules(root=self.image_root, hosts=frozenset(self.image_hosts))

    @property
    def source(self) -> Source:
        """Way in which the worker comes by its engines."""
        if self.simulated is not None:
            return "simulate"
        if self.launch is not None:
            return "launch"
        return "router" if self.router else "url"
