"""Port of a client: the part that a session, its feeder and its publishers need.

They depend on this protocol, not on the client itself, which imports them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trainer_client.client.driver import Deadline
from trainer_client.client.engines import Quorum
from trainer_client.client.evaluation.blocking import Evaluation
from trainer_client.client.pulling import PullLoop, PullSpec
from trainer_client.client.requests import ResumeMode, Submission
from trainer_client.policy import Policy
from trainer_client.state import Published, Resumed, RunState, Submitted, TrainerTime
from trainer_client.tasks import Task
from trainer_client.waiting import OnWait

if TYPE_CHECKING:
    from trainer_client.batch import Batch
    from trainer_client.manifest import Manifest
    from trainer_client.publish.collective.plan import CollectivePlan


class SessionClient(Protocol):
    """Methods of its client that a session needs; `BufferClient` documents each."""

    @property
    def target(self) -> str:
        """Address of the service."""

    def create_run(self, run_id: str, policy: Policy | None = None) -> RunState:
        """Create a run, or find it."""

    def run(self, run_id: str, *, timeout_s: float | None = None) -> RunState:
        """Read the whole state of a run."""

    def update_policy(self, run_id: str, policy: Policy | None = None, **changes: object) -> Policy:
        """Change the policy of a live run."""

    def resume(
        self, run_id: str, *, next_step: int | None = None, mode: ResumeMode = "replay", allow_regenerate: bool = False
    ) -> Resumed:
        """Take the run over: begin a new epoch, in which every older trainer is refused."""

    def submit_tasks(
        self, run_id: str, submission: Submission, *, timeout_s: float | None = None, on_wait: OnWait | None = None
    ) -> Submitted:
        """Add tasks and move the feeder's cursor."""

    def pull_loop(self, run_id: str) -> PullLoop:
        """Make the loop in which pulls of the run wait."""

    def try_pull(self, run_id: str, spec: PullSpec, within: Deadline) -> "Batch":
        """Try a pull once, for that loop."""

    def commit(self, run_id: str, *, epoch: int, through_step: int) -> int:
        """Mark every step up to and including `through_step` as trained."""

    def checkpoint(self, run_id: str, *, epoch: int, through_step: int) -> int:
        """Free replay data up to and including `through_step`."""

    def publish(
        self,
        run_id: str,
        *,
        epoch: int,
        version: int,
        manifest: "Manifest | None" = None,
        commit_through: int | None = None,
        time_spent: TrainerTime | None = None,
    ) -> Published:
        """Make a version the published weights."""

    def plan_collective(
        self, run_id: str, *, epoch: int, plan: "CollectivePlan", timeout_s: float | None = None
    ) -> None:
        """Announce a collective update of the weights."""

    def wait_for_engines(
        self,
        run_id: str,
        version: int,
        count: Quorum = 1,
        *,
        epoch: int | None = None,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> RunState:
        """Wait until engines are ready with a version."""

    def evaluate(
        self,
        run_id: str,
        tasks: Sequence[Task],
        *,
        epoch: int,
        version: int | None = None,
        eval_id: str | None = None,
    ) -> Evaluation:
        """Have tasks generated at one weight version."""
