"""Records of what a rank trained on and what came of it: one line of JSON a step, in a file of each rank."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer_client import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank."""

    step: int
    groups: list[int]
    """Sequence numbers of the rank's groups."""
    sha256: str
    """Digest of the payloads, in order."""
    tokens: int
    """Tokens of the rank's groups."""
    total_groups: int
    total_tokens: int
    """Over all ranks."""
    loss: float
    """Over all ranks; JSON keeps every bit of it."""
    reward: float
    """Mean over all ranks' samples."""
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step over all ranks, as the table shows it."""

    step: int
    version: int
    tokens: list[int]
    """Values by rank."""
    reward: float
    loss: float
    staleness: float
    waited_s: float
    trained_s: float
    published_s: float

    @property
    def imbalance(self) -> float:
        """Excess of the fullest rank over the mean, as a share of it."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens) - 1


HEADER = "  step version   tokens  fullest  staleness    loss  reward  wait s  train s  publish s"


def table_row(view: StepView) -> str:
    """A line below HEADER."""
    return (
        f"{view.step:>6} {view.version:>7} {sum(view.tokens):>8} {view.imbalance:>+8.1%} {view.staleness:>10.2f} "
        f"{view.loss:>7.4f} {view.reward:>7.3f} {view.waited_s:>7.2f} {view.trained_s:>8.2f} {view.published_s:>10.2f}"
    )


def payload_digest(batch: Batch) -> str:
    """SHA-256 over the payloads of the batch's groups, as they were received."""
    digest = hashlib.sha256()
    for group in batch.groups:
        digest.update(group.payload)
    return digest.hexdigest()


def append(path: Path, record: StepRecord) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> list[StepRecord]:
    """All lines."""
    return [StepRecord(**json.loads(line)) for line in path.read_text().splitlines()]
