"""What a publish is made of: where the weights come from, which publish it is, and who makes them available.

A publisher is told of a run's whole life: `resumed` when a trainer takes it over, then for each version `offer` before
the service publishes it and `published` after, and `checkpointed` when older ones are not needed any more.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from trainer_client.client.port import SessionClient
from trainer_client.manifest import Manifest
from trainer_client.state import RunState
from trainer_client.waiting import OnWait, WaitNotices

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from trainer_client.publish.collective.plan import CollectivePlan

Save: TypeAlias = Callable[[Path], object]
"""Writes weights into the empty directory that it is given, e.g. `model.save_pretrained`."""

TensorSource: TypeAlias = "Mapping[str, Tensor] | Module | Callable[[], Iterable[tuple[str, Tensor]]]"
"""A state dict, a module, or a function that gives the names and tensors anew, and in the same order, at each call."""

WeightSource: TypeAlias = "Manifest | Path | str | Save | TensorSource | None"


@dataclass(frozen=True, slots=True)
class Publication:
    """One publish of one run, and what its publisher may do at the service meanwhile."""

    client: SessionClient
    run_id: str
    epoch: int
    version: int
    on_wait: OnWait | None = None

    def state(self, timeout_s: float | None = None) -> RunState:
        """The whole state of the run."""
        return self.client.run(self.run_id, timeout_s=timeout_s)

    def announce(self, plan: "CollectivePlan", timeout_s: float | None = None) -> None:
        """Tell the workers of a collective update. Raises VersionConflict, StaleEpoch, InvalidField."""
        self.client.plan_collective(self.run_id, epoch=self.epoch, plan=plan, timeout_s=timeout_s)

    def notices(self, doing: str) -> WaitNotices:
        """Says on whom the publish waits, while it waits."""
        return WaitNotices(f"publishing version {self.version}: {doing}", self.client.target, self.on_wait)


class WeightPublisher(Protocol):
    """Where weights are put for the engines, and how long they stay; `trainer_client.publish` has some."""

    def offer(self, source: WeightSource, publication: Publication) -> Manifest:
        """Make the weights available; what the manifest names stays unchanged."""

    def offer_again(self, version: int, publication: Publication) -> Manifest:
        """Make the weights of an older version available as the publication's. Raises InvalidField if they are gone."""

    def published(self, manifest: Manifest, *, committed_steps: int) -> None:
        """The service offers them now; the steps below `committed_steps` are in them."""

    def checkpointed(self, steps: int) -> None:
        """No resume goes back before step `steps` any more."""

    def resumed(self, next_step: int) -> None:
        """What was published after more than `next_step` steps is abandoned."""


@runtime_checkable
class RepeatingPublisher(WeightPublisher, Protocol):
    """A publisher of weights that engines can miss, which can send the last ones again."""

    def repeats(self, version: int) -> bool:
        """True when an engine that has missed `version` can get it by `repeat` only, and `repeat` can."""

    def repeat(self, publication: Publication) -> Manifest:
        """The last version's weights once more, as the publication's version. Raises what `offer` does."""
