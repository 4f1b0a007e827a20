"""A trainer that publishes by broadcast and is killed when the members of its third update have been told to receive.

python -m tests.e2e.dying_trainer ADDRESS DIRECTORY_OF_MODELS
"""

import itertools
import os
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.test_worker_engine import endless
from trainer_client import BufferClient, ClientOptions, Policy, SessionOptions
from trainer_client.publish import CollectivePublisher
from trainer_client.publish.collective.plan import CollectivePlan

POLICY = Policy(
    batch_groups=4, max_queued_groups=8, overflow_action="block", max_staleness=8, max_attempts=20, retry_backoff_ms=100
)
UPDATES_BEFORE = 2


class Dying(BufferClient):
    """Sends nothing after the announcement that it will."""

    def plan_collective(self, run_id: str, *, term: int, plan: CollectivePlan, timeout_s: float | None = None) -> None:
        super().plan_collective(run_id, term=term, plan=plan, timeout_s=timeout_s)
        if plan.phase == "broadcast" and plan.version.version > UPDATES_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)


def main(address: str, models: Path) -> None:
    """Train until it is over."""
    with (
        Dying(address, ClientOptions(timeout_s=60)) as client,
        CollectivePublisher(timeout_s=60) as publisher,
        client.session(
            "r", policy=POLICY, tasks=endless(), publisher=publisher, options=SessionOptions(pull_timeout_s=300)
        ) as session,
    ):
        # An engine that is not there yet would miss the first update, which comes without files.
        client.wait_for_engines("r", 0, 2)
        for _ in itertools.islice(session, 2 * UPDATES_BEFORE):
            session.publish(load_file(models / f"model-{session.version + 1}" / "model.safetensors"), wait_for=2)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
