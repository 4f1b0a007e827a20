"""`python -m examples.sandboxes`: starts per minute, errors of two kinds and caches kept across updates, with SGLang.

With --simulate the engine only keeps SGLang's timing.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from examples.agents.model import VOCAB_SIZE, written
from examples.demo.processes import service, sglang, worker
from trainer_client import BufferClient, Environment, Policy, SamplingParams, SessionOptions, Task
from trainer_client.publish import FilesPublisher
from trainer_client.state import EnvironmentWork

RUN_ID = "sandboxes"
ENVIRONMENTS = ("program", "talk")
POLICY = Policy(
    batch_groups=8,
    max_staleness=4,
    failure_budget=0,
    environments={"program": Environment(starts_per_minute=180, start_burst=4)},
)


def tasks() -> Iterator[Task]:
    """Tasks of both environments in turn, without end."""
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:06d}",
            group_size=4,
            environment=ENVIRONMENTS[i % 2],
            sampling=SamplingParams(max_new_tokens=64),
            messages=[{"role": "user", "content": f"name a number, such as {i % 100}"}],
        )


def run(
    steps: int, engine: list[str], models: list[Path], scratch: Path
) -> Iterator[tuple[Counter[str], Counter[str], list[EnvironmentWork]]]:
    """Yield, for each batch, its groups by environment, its samples by named failure, and the run's work so far."""
    flags = ["--rollout", "examples.sandboxes.programs:rollout", "--prefix-cache", "group"]
    flags += ["--environment-limit", "program.generate_timeout_s=60"]
    flags += ["--environment-limit", "program.max_sample_attempts=6"]
    with (
        service(scratch / "service") as (_, address, _),
        worker(address, RUN_ID, scratch, *flags, *engine) as started,
        BufferClient(address) as client,
        FilesPublisher(scratch / "published") as publisher,
        client.session(
            RUN_ID,
            policy=POLICY,
            tasks=tasks(),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=300.0, on_wait=lambda _: started.check()),
        ) as session,
    ):
        for batch, model in zip(itertools.islice(session, steps), itertools.cycle(models), strict=False):
            failures = Counter(sample.failure for sample in batch.samples if sample.failure)
            groups = Counter(group.environment for group in batch.groups)
            yield groups, failures, list(client.run(RUN_ID).environment_work)
            session.publish(partial(shutil.copytree, model, dirs_exist_ok=True))


def main(argv: list[str] | None = None) -> int:
    """Print a line for every batch, and what the environments took; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.sandboxes", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="batches to pull (default 8)")
    parser.add_argument("--simulate", action="store_true", help="no SGLang: characters at random")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    work: list[EnvironmentWork] = []
    with tempfile.TemporaryDirectory(prefix="sandboxes-") as folder:
        scratch = Path(folder)
        models = written(scratch / "models", None if options.simulate else options.sglang_python, count=2)
        engine = sglang(models[0], options.sglang_python)
        if options.simulate:
            engine = ["--simulate", "--vocab-size", str(VOCAB_SIZE), "--tokenizer", str(models[0])]
        print(f"{'batch':>5} {'program':>8} {'talk':>5} {'no number':>10}")
        for step, (groups, failures, so_far) in enumerate(run(options.steps, engine, models, scratch)):
            print(f"{step:>5} {groups['program']:>8} {groups['talk']:>5} {failures['no_number']:>10}", flush=True)
            work = so_far
    for each in work:
        print(f"{each.environment}: {each.starts} leases, {each.failed_attempts} failed, {each.failed_samples} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
