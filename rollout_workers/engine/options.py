"""Options of the engines that a worker starts itself, and what any engine's host reads of a worker's options."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from buffer_wire.errors import InvalidField

DEVICES = ("cpu", "cuda")
"""Devices on which launched servers can compute."""

Source = Literal["url", "router", "launch", "simulate"]
"""Way in which a worker comes by its engines."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """SGLang servers that the worker starts itself and ends with itself."""

    model_path: Path
    """Directory of the model, with its tokenizer unless tasks carry token ids."""

    engines: int = 1
    """Servers to start, 1 to 64, all with the same model."""

    sglang_python: Path = Path(".venv-sglang/bin/python")
    """Interpreter of the environment that SGLang is installed in."""

    device: str = "cpu"
    """cpu (SGLang is given bounds for a small model on few cores) or cuda (its own defaults, which plan for a whole
    GPU)."""

    gpus_per_engine: int = 0
    """GPUs of each engine, 0 to 64: the first engine gets the first so many of those that this process sees
    (CUDA_VISIBLE_DEVICES, or all), and so on. 0: one engine, which sees all."""

    extra_flags: tuple[str, ...] = ()
    """Arguments passed on to SGLang's launch_server, each flag and each value one entry."""

    ready_timeout_s: float = 300.0
    """Longest time from start to ready."""

    log_dir: Path | None = None
    """Directory of the servers' logs; default: weights_dir."""

    def __post_init__(self) -> None:
        check("launch.engines", self.engines, lambda n: 1 <= n <= 64, "1 to 64")
        check("launch.device", self.device, lambda d: d in DEVICES, f"one of {', '.join(DEVICES)}")
        check("launch.gpus_per_engine", self.gpus_per_engine, lambda n: 0 <= n <= 64, "0 to 64")
        if self.device == "cuda" and self.engines > 1 and not self.gpus_per_engine:
            raise InvalidField("launch.gpus_per_engine", 0, "1 or more with several engines, which share the GPUs out")
        if self.device != "cuda" and self.gpus_per_engine:
            raise InvalidField("launch.gpus_per_engine", self.gpus_per_engine, "0 unless launch.device is cuda")
        check("launch.ready_timeout_s", self.ready_timeout_s, is_positive, "a finite number of seconds above 0")


@dataclass(frozen=True, slots=True)
class SimulatedOptions:
    """Engines that only keep SGLang's timing and bookkeeping: for load tests, without any model."""

    engines: int = 1
    """Simulated engines of the worker, 1 to 1,024."""

    tokens_per_s: float = 200.0
    """Decoding speed of one sample."""

    slots: int = 256
    """Samples decoded at once by one engine."""

    length_median: float = 64.0
    """Median length of a response in tokens, capped by the task's max_new_tokens."""

    length_sigma: float = 0.5
    """Spread of the logarithm of the lengths; 0 makes all equal."""

    vocab_size: int = 1_024
    """Size of the vocabulary: token ids are drawn from 0 to this, exclusive."""

    seed: int = 0

    def __post_init__(self) -> None:
        check("simulated.engines", self.engines, lambda n: 1 <= n <= 1_024, "1 to 1,024")
        check("simulated.tokens_per_s", self.tokens_per_s, is_positive, "a finite number above 0")
        check("simulated.vocab_size", self.vocab_size, lambda n: 2 <= n <= 1 << 31, "2 to 2^31")


class HostOptions(Protocol):
    """Options of a worker, as far as the kinds of engines read them; WorkerOptions says what each means."""

    # ruff: noqa: D102

    @property
    def source(self) -> Source: ...
    @property
    def pause_mode(self) -> str: ...
    @property
    def prefix_cache(self) -> str: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def base_model(self) -> str | None: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def weights_dir(self) -> Path: ...
    @property
    def launch(self) -> LaunchOptions | None: ...
    @property
    def simulated(self) -> SimulatedOptions | None: ...
    @property
    def sglang_version(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def stream_interval(self) -> int: ...
    @property
    def generate_timeout_s(self) -> float: ...
    @property
    def reload_timeout_s(self) -> float: ...
    @property
    def engine_timeout_s(self) -> float: ...


def is_positive(value: float) -> bool:
    """True for a finite number above 0."""
    return isfinite(value) and value > 0


def check(name: str, value: T, holds: Callable[[T], bool], limit: str) -> None:
    """Raise InvalidField unless `holds(value)`."""
    if not holds(value):
        raise InvalidField(name, value, limit)
