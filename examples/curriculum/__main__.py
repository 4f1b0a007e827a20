"""`python -m examples.curriculum`: a curriculum by pass rate, which hears what became of every group.

Three pools of sums, of which one is learned soon and one is too hard at first. The policy filters groups of equal
rewards, which teach nothing; the curriculum hears of them all the same, and draws where rewards differ.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from examples.curriculum.pools import POOLS, Pools
from examples.demo.learner import Learner
from examples.demo.loop import train
from examples.demo.model import build_model, save_model
from examples.demo.processes import service, sglang, worker
from examples.demo.tasks import ChainSums
from examples.demo.warmup import WarmUpConfig, warm_up
from trainer_client import BufferClient, Policy, SessionOptions
from trainer_client.publish import FilesPublisher

RUN_ID = "curriculum"
POLICY = Policy(
    batch_groups=16,
    max_queued_groups=16,
    overflow_action="drop_oldest",
    max_staleness=4,
    filter_equal_rewards=True,
    record_groups=True,
)
EVERY = 10
"""Steps of a printed line."""


class Table:
    """Rows of ten steps: means over them, pass rates at their end. It is the `on_step` of a session."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._rows: list[dict[str, float]] = []
        print(f"{'steps':>6} {'reward':>7} {'all right':>10} {'all wrong':>10}   drawn and pass rate of each pool")

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of a step."""
        self._rows.append(metrics)
        if step % EVERY == EVERY - 1:
            pools = "   ".join(f"{name} {self._pools.drawn[name]}, {self._pools.rates[name]:.2f}" for name in POOLS)
            right, wrong = self._share("all_right"), self._share("all_wrong")
            reward = sum(row["rollout_buffer/reward_mean"] for row in self._rows) / len(self._rows)
            print(f"{step + 1:>6} {reward:>7.2f} {right:>10.2f} {wrong:>10.2f}   {pools}", flush=True)
            self._rows = []

    def _share(self, name: str) -> float:
        groups = sum(row["rollout_buffer/outcomes/groups"] for row in self._rows)
        mean = f"rollout_buffer/outcomes/{name}_share"
        return sum(row.get(mean, 0.0) * row["rollout_buffer/outcomes/groups"] for row in self._rows) / max(1.0, groups)


def main(argv: list[str] | None = None) -> int:
    """Print a line for every tenth step; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.curriculum", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--uniform", action="store_true", help="draw from each pool as often, for comparison")
    parser.add_argument("--function", action="store_true", help="filter each step by a function, besides the policy")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="curriculum-") as directory:
        scratch = Path(directory)
        model = build_model(1)
        learner = Learner(model)
        report = warm_up(model, ChainSums(10_001), WarmUpConfig(target_exact_match=0.5))
        print(f"warm-up: {report.steps} supervised steps, exact match {report.exact_match:.2f} on easy", flush=True)
        save_model(model, scratch / "model")
        reward = ("--reward", "examples.demo.worker_reward:reward")
        engine = sglang(scratch / "model", options.sglang_python, "--dtype=float32")
        pools = Pools(1, adaptive=not options.uniform)
        with (
            service(scratch / "service") as (_, address, _),
            worker(address, RUN_ID, scratch, *reward, *engine) as started,
            BufferClient(address) as client,
            FilesPublisher(scratch / "weights") as publisher,
            client.session(
                RUN_ID,
                policy=POLICY,
                tasks=pools,
                publisher=publisher,
                options=SessionOptions(
                    filter="examples.curriculum.rules:informative" if options.function else None,
                    # Few tasks ahead: what is drawn now is generated soon.
                    max_pending_tasks=32,
                    chunk_tasks=8,
                    pull_timeout_s=300.0,
                    on_wait=lambda _: started.check(),
                    on_step=Table(pools),
                ),
            ) as session,
        ):
            train(session, learner, options.steps, lambda _: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
