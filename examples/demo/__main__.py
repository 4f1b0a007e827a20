"""`make demo`: a small language model learns arithmetic through the whole asynchronous loop, every part real.

The parts: tasks from reasoning-gym, the buffer service over a private Valkey, and a rollout worker with SGLang servers
on the CPU. This process is the trainer, which publishes new weights after every step.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from examples.demo.learner import Learner
from examples.demo.loop import POLICY, RUN_ID, buffer_tasks, train
from examples.demo.model import build_model, save_model
from examples.demo.plot import StepRecord, plot_run
from examples.demo.processes import Child, service, sglang, worker
from examples.demo.progress import Display
from examples.demo.records import DemoStep, summarize, write_summary
from examples.demo.tasks import ChainSums
from examples.demo.warmup import warm_up
from trainer_client import BufferClient, SessionOptions
from trainer_client.publish import FilesPublisher
from trainer_client.waiting import Waiting

_WARM_UP_SEED_OFFSET = 10_000
"""The warm-up's tasks are another stream than the ones that are rewarded."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of the model and its tasks (default 1)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--engines", type=int, default=1, help="SGLang servers (default 1)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="where results go (default demo_out)")
    parser.add_argument(
        "--sglang-python",
        type=Path,
        default=Path(".venv-sglang/bin/python"),
        help="interpreter of the environment that holds SGLang (default .venv-sglang/bin/python)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1 or options.engines < 1:
        parser.error("--steps and --engines must be at least 1")
    if not options.sglang_python.exists():
        parser.error(f"{options.sglang_python} does not exist: run `make install-sglang`, or name another one")
    return options


def main() -> int:
    """Run the demo; 0 when it went through."""
    options = arguments()
    started = time.perf_counter()
    out: Path = options.out.resolve()
    scratch = out / f"run-{time.strftime('%Y%m%d-%H%M%S')}-seed{options.seed}"
    scratch.mkdir(parents=True)
    display = Display(options.steps)

    model = build_model(options.seed)
    display.stage(f"warming up a Qwen3 of {sum(p.numel() for p in model.parameters()):,} parameters")
    learner = Learner(model)
    report = warm_up(model, ChainSums(options.seed + _WARM_UP_SEED_OFFSET))
    display.stage(f"warm-up: {report.steps} supervised steps, expected exact match {report.exact_match:.2f}")
    save_model(model, scratch / "model")

    with ExitStack() as stack:
        buffer, address, admin = stack.enter_context(service(scratch / "service"))
        display.stage(f"buffer service at {address}, its page at {admin}/, metrics at {admin}/metrics")
        flags = ["--reward", "examples.demo.worker_reward:reward", "--groups-per-engine", "16"]
        flags += ["--engines", str(options.engines)]
        flags += sglang(scratch / "model", options.sglang_python, "--dtype=float32")
        started_worker = stack.enter_context(worker(address, RUN_ID, scratch, *flags))
        display.stage(f"worker starts {options.engines} SGLang server(s) on CPU (about 20 s)")

        def on_wait(waiting: Waiting) -> None:
            _check(buffer, started_worker)
            display.waiting(str(waiting))

        client = stack.enter_context(BufferClient(address))
        publisher = stack.enter_context(FilesPublisher(scratch / "weights"))
        session = stack.enter_context(
            client.session(
                RUN_ID,
                policy=POLICY,
                tasks=buffer_tasks(ChainSums(options.seed)),
                publisher=publisher,
                next_step=0,
                options=SessionOptions(on_wait=on_wait, pull_timeout_s=300.0),
            )
        )
        session.wait_for_engines(options.engines, timeout_s=300.0, on_wait=on_wait)
        display.stage("engines are ready; training")
        stack.enter_context(display)
        steps = train(session, learner, options.steps, display.step)
        run = session.wait_for_engines(options.engines, timeout_s=60.0)

    _report(display, out, summarize(steps, run, seed=options.seed, wall_s=time.perf_counter() - started), steps)
    return 0


def _check(*children: Child) -> None:
    for child in children:
        child.check()


def _report(display: Display, out: Path, summary: dict[str, object], steps: list[DemoStep]) -> None:
    write_summary(summary, out / "summary.json")
    records = [StepRecord(s.step, s.reward, s.staleness_mean, s.staleness_max, s.version) for s in steps]
    plot_run(records, out / "reward.png", title="A policy learns sums through the buffer", eta=POLICY.max_staleness)
    display.stage(
        f"reward {summary['reward_first']:.3f} → {summary['reward_last']:.3f} in {summary['steps']} steps; "
        f"{summary['versions_published']} versions published, {summary['engine_reloads']} reloads in flight; "
        f"staleness {summary['staleness_mean']:.2f} on average, {summary['staleness_max']} at most "
        f"(η = {summary['eta']})"
    )
    display.stage(f"both ledgers balance: {summary['ledgers_balanced']}; see {out}/summary.json and {out}/reward.png")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; every process was stopped")
