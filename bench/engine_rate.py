"""Samples per second of a real SGLang server on this machine, alone and beside a training loop.

    python -m bench.engine_rate --sglang-python .venv-sglang/bin/python --dtype float32

The demo's sizes follow from these figures: short prompts, short answers, groups of 8 in one request each, several
groups in flight, and a trainer on the same cores. Each line is one measurement of `--seconds`, after a second of
warm-up. It has the rate of finished samples and generated tokens, and the 50th and 95th percentile of a group's time.
It also says how many reloads were done, how long one stopped the engine, and the trainer's steps per second.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions
from rollout_workers.engine.types import PauseMode, SampleRequest

GROUP = 8
PROMPT_TOKENS = 12
VOCABULARY = 128


@dataclass(slots=True)
class Tally:
    """Counts of the measured seconds."""

    samples: int = 0
    tokens: int = 0
    group_s: list[float] = field(default_factory=list)
    reload_s: list[float] = field(default_factory=list)


def make_model(directory: Path, *, hidden: int, layers: int, dtype: str) -> None:
    """A random Qwen3 without a tokenizer: token ids go in and come out."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)


def train_forever(directory: Path) -> None:
    """The load beside the engine: optimizer steps over 256 short sequences, one line of JSON for each."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(3, VOCABULARY, (256, PROMPT_TOKENS + 6))
    while True:
        started = time.monotonic()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"at": time.monotonic(), "step_s": time.monotonic() - started}), flush=True)


@contextlib.contextmanager
def trainer_beside(directory: Path, log: Path) -> Iterator[None]:
    """A training process that runs until the block ends."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.engine_rate", "--train", str(directory)], stdout=out, stderr=out
        )
        try:
            while process.poll() is None and '"at"' not in log.read_text():
                time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


def trainer_steps(log: Path, start: float, end: float) -> int:
    """Steps that ended between two times of the monotonic clock."""
    steps = (json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"at"'))
    return sum(start <= step["at"] <= end for step in steps)


async def keep_generating(engine: SglangEngine, rng: np.random.Generator, tally: Tally, new_tokens: int) -> None:
    """One group after another, each in one request."""
    while True:
        prompt = rng.integers(3, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
        requests = [SampleRequest(sample_index=i, input_ids=prompt, max_new_tokens=new_tokens) for i in range(GROUP)]
        started = time.monotonic()
        samples = await engine.generate(requests)
        tally.group_s.append(time.monotonic() - started)
        tally.samples += len(samples)
        tally.tokens += sum(len(sample.output_ids) for sample in samples)


async def keep_reloading(engine: SglangEngine, model: Path, tally: Tally, every_s: float) -> None:
    """A reload in flight every `every_s` seconds."""
    version = 0
    while True:
        await asyncio.sleep(every_s)
        version += 1
        started = time.monotonic()
        await engine.pause(PauseMode.RETRACT)
        await engine.load_files(model, f"1.{version}")
        await engine.resume()
        tally.reload_s.append(time.monotonic() - started)


async def measure(engine: SglangEngine, model: Path, options: argparse.Namespace, in_flight: int) -> Tally:
    """`options.seconds` of generation with `in_flight` groups at once, after a second of warm-up."""
    tally = Tally()
    rng = np.random.default_rng(0)
    tasks = [asyncio.create_task(keep_generating(engine, rng, tally, options.new_tokens)) for _ in range(in_flight)]
    if options.reload_every:
        tasks.append(asyncio.create_task(keep_reloading(engine, model, tally, options.reload_every)))
    try:
        await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
        tally.samples = tally.tokens = 0
        tally.group_s.clear()
        await asyncio.wait(tasks, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
        return Tally(tally.samples, tally.tokens, list(tally.group_s), list(tally.reload_s))
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


async def run(options: argparse.Namespace, directory: Path) -> None:
    """Start a server, measure, print."""
    model = directory / "model"
    make_model(model, hidden=options.hidden, layers=options.layers, dtype=options.dtype)
    server = SglangServerOptions(
        python=options.sglang_python,
        model_path=model,
        log_path=directory / "sglang.log",
        dtype=options.dtype,
        context_length=512,
        max_running_requests=max(options.in_flight) * GROUP,
        extra_flags=("--skip-tokenizer-init", *options.flags.split()),
        stop_grace_s=0.5,
    )
    started = time.monotonic()
    async with SglangLauncher(server) as launcher:
        engine = SglangEngine(launcher.base_url)
        print(f"hidden {options.hidden}, {options.layers} layers, {options.dtype}; ", end="")
        print(f"{options.new_tokens} new tokens; ready after {time.monotonic() - started:.1f} s")
        print("groups in flight  trainer  samples/s  tokens/s  group p50/p95 ms  reloads  ms each  train steps/s")
        for in_flight in options.in_flight:
            for trainer in (False, True):
                log = directory / "trainer.log"
                with trainer_beside(model, log) if trainer else contextlib.nullcontext():
                    start = time.monotonic()
                    tally = await measure(engine, model, options, in_flight)
                    end = time.monotonic()
                steps = trainer_steps(log, start, end) / (end - start) if trainer else 0.0
                p50, p95 = np.percentile(tally.group_s, (50, 95)) * 1e3
                each = 1e3 * float(np.mean(tally.reload_s)) if tally.reload_s else 0.0
                print(
                    f"{in_flight:16d}  {'beside' if trainer else 'none':>7}  {tally.samples / options.seconds:9.0f}"
                    f"  {tally.tokens / options.seconds:8.0f}  {p50:8.1f}/{p95:7.1f}  {len(tally.reload_s):7d}"
                    f"  {each:7.1f}  {steps:13.1f}"
                )
        await engine.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--new-tokens", type=int, default=5)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--reload-every", type=float, default=0.0, help="seconds between reloads; 0: none")
    parser.add_argument("--flags", default="", help="further flags of the server, in one string")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train_forever(options.train)
    with tempfile.TemporaryDirectory(prefix="engine-rate-") as directory:
        asyncio.run(run(options, Path(directory)))


if __name__ == "__main__":
    main()
