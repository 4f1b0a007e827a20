"""`python -m examples.lora`: trains a LoRA adapter of a tiny Qwen3 on SGLang's rollouts; adapters alone are published.

It starts the service, and a worker with SGLang, which takes every version while it generates. `ratio` at staleness 0 is
1: the engine under the adapter is the model that is trained.
"""

import argparse
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from examples.demo.processes import service, sglang, worker
from examples.lora.adapter import TARGETS, Adapter
from examples.plain.__main__ import prepared_model, tasks
from examples.plain.loop import POLICY, train_step
from trainer_client import BufferClient, SessionOptions
from trainer_client.collate import collate
from trainer_client.publish import AdapterPublisher, FilesPublisher

RUN = "lora"
RANK = 8
ENGINE = (
    "--dtype=float32", "--enable-lora", f"--max-lora-rank={RANK}", "--max-loras-per-batch=3", "--lora-strict-loading",
    "--lora-target-modules", *TARGETS,
)  # fmt: skip


def show(step: int, metrics: dict[str, float]) -> None:
    """A line for a step."""
    print(
        f"{step:>5} {metrics['loss']:>8.4f} {metrics['reward']:>7.3f} {metrics['ratio_mean']:>7.3f}"
        f" {metrics['rollout_buffer/staleness_mean']:>9.2f}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Print a line for every step; 0 when all are done."""
    parser = argparse.ArgumentParser(prog="python -m examples.lora", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps (default 16)")
    parser.add_argument("--out", type=Path, default=Path("demo_out/lora"), help="everything goes there")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"), help="of SGLang")
    options = parser.parse_args(argv)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model, directory = prepared_model(None, out)
    adapter = Adapter(model, rank=RANK, alpha=2 * RANK)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=3e-3)
    with ExitStack() as stack:
        _, address, _ = stack.enter_context(service(out / "service"))
        engine = sglang(directory, options.sglang_python, *ENGINE)
        stack.enter_context(worker(address, RUN, out, "--reward", "examples.plain.reward:even_share", *engine))
        client = stack.enter_context(BufferClient(address))
        publisher = stack.enter_context(AdapterPublisher(FilesPublisher(out / "adapters", serve="http")))
        session = stack.enter_context(
            client.session(RUN, policy=POLICY, tasks=tasks(), publisher=publisher, options=SessionOptions(on_step=show))
        )
        print(f"{'step':>5} {'loss':>8} {'reward':>7} {'ratio':>7} {'staleness':>9}")
        for batch in itertools.islice(session, options.steps):
            session.log(train_step(model, optimizer, collate(batch)))
            session.publish(adapter.save)
        run = client.run(RUN)
    print(f"{run.engines[0].reloads} adapters were loaded, the last one in {run.engines[0].last_reload_ms} ms")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
