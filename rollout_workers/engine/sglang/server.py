"""Command line and environment of an SGLang server that the worker starts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServerOptions:
    """Options for the start of one SGLang server.

    On a CPU, None becomes a value that serves a small model on few cores. Elsewhere None is left to SGLang, which plans
    for the whole of a GPU.
    """

    python: Path
    """Interpreter of the environment that has SGLang."""
    model_path: Path
    """Directory with config, tokenizer and safetensors."""
    log_path: Path
    """File to which the server's output is appended."""
    weight_version: str = "0"
    """Label of the weights that it starts with."""
    device: str = "cpu"
    """cpu or cuda. cpu adds the flags and the environment that SGLang needs without a GPU."""
    gpus: Sequence[str] | None = None
    """CUDA_VISIBLE_DEVICES; None: as this process has it."""
    dtype: str = "auto"
    """Type that it computes in: auto (the checkpoint's), float32, bfloat16, float16."""
    context_length: int | None = None
    """Maximum tokens of one request, prompt and answer. On a CPU 4,096, elsewhere the model's."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens. On a CPU 65,536: without a bound SGLang plans for most of the memory."""
    max_running_requests: int | None = None
    """Requests decoded at once. On a CPU 32."""
    threads: int | None = None
    """OMP_NUM_THREADS, unless the environment has it. On a CPU 1: more make small models slower, and starve whatever
    else runs on the machine."""
    overlap_schedule: bool | None = None
    """SGLang's overlap scheduler. Not on a CPU: on two cores it costs a factor of ten. With it an in_place pause
    credits one token of the old weights to the new version."""
    sleep_on_idle: bool | None = None
    """Do not spin while there is nothing to do. On a CPU only."""
    metrics: bool = False
    """Serve /metrics."""
    log_level: str = "warning"
    counts_as: str = ""
    """Release of SGLang that the server is taken for; empty: the one that it says."""
    extra_flags: Sequence[str] = ()
    """Further arguments of sglang.launch_server, each flag and each value one entry; the last of a flag wins."""
    port: int = 0
    """Port of the server; 0: a free one is chosen."""
    ready_timeout_s: float = 180.0
    """Longest time from start to ready: it takes 12 s on a quiet machine, a minute on a busy one."""
    stop_grace_s: float = 8.0
    """Time between SIGTERM and SIGKILL. SGLang looks for the signal every 5 s, and waits for running requests."""


_CPU: dict[str, Any] = {
    "context_length": 4_096,
    "max_total_tokens": 65_536,
    "max_running_requests": 32,
    "threads": 1,
    "overlap_schedule": False,
    "sleep_on_idle": True,
}
"""Options that replace None on a CPU."""


def for_cpu(options: SglangServerOptions) -> SglangServerOptions:
    """Options with None replaced by the values for a CPU."""
    given = {name: getattr(options, name) for name in _CPU if getattr(options, name) is not None}
    return replace(options, **{**_CPU, **given})


def arguments(options: SglangServerOptions, port: int) -> list[str]:
    """Arguments of the interpreter that start the server at this port."""
    given = ["-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
    given += ["--model-path", str(options.model_path), "--weight-version", options.weight_version]
    given += ["--device", options.device, "--dtype", options.dtype, "--log-level", options.log_level]
    if options.context_length is not None:
        given += ["--context-length", str(options.context_length)]
    if options.max_total_tokens is not None:
        given += ["--max-total-tokens", str(options.max_total_tokens)]
    if options.max_running_requests is not None:
        given += ["--max-running-requests", str(options.max_running_requests)]
    if options.device == "cpu":
        given += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        given += ["--grammar-backend", "none"]
        if "--enable-lora" in options.extra_flags:
            given += ["--lora-backend", "torch_native"]
    if options.overlap_schedule is False:
        given.append("--disable-overlap-schedule")
    # Events of a stream bring what is new, instead of all so far each time.
    given.append("--incremental-streaming-output")
    if options.sleep_on_idle:
        given.append("--sleep-on-idle")
    if options.metrics:
        given.append("--enable-metrics")
    return [*given, *options.extra_flags]


def environment(options: SglangServerOptions) -> dict[str, str]:
    """Environment of the server: this process's, without what belongs to this process alone."""
    values = dict(os.environ)
    if options.threads is not None:
        values.setdefault("OMP_NUM_THREADS", str(options.threads))
    if options.device == "cpu":
        # Its models are files on this machine: nothing is looked up elsewhere, unless somebody wants it. Penalties
        # are compiled at their first use, which needs more than a CPU's environment has, and ends the server.
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "SGLANG_USE_CPU_ENGINE", "TORCHDYNAMO_DISABLE"):
            values.setdefault(name, "1")
    # What a model made of an image is kept over loads of weights otherwise.
    values.setdefault("SGLANG_VLM_CACHE_SIZE_MB", "0")
    if options.gpus is not None:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(options.gpus)
    for inherited in (
        "PYTHONPATH",  # of this environment, not of that one
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PYTHONDONTWRITEBYTECODE",  # would cost every later start seven seconds
        "SGLANG_RETURN_ORIGINAL_LOGPROB",  # would report log-probabilities from before the temperature
    ):
        values.pop(inherited, None)
    return values
