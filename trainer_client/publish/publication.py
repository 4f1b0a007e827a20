"""Publication: the source of the weights, the publish they belong to, and the publisher that makes them available.

A session informs its publisher throughout a run. It calls `resumed` when a trainer takes the run over. For each version
it calls `offer` before the service publishes it and `published` after. It calls `checkpointed` when older versions are
not needed any more.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from trainer_client.client.operations import ServiceClient
from trainer_client.manifest import Manifest
from trainer_client.state import RunState
from trainer_client.waiting import OnWait, WaitNotices

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from trainer_client.publish.collective.plan import CollectivePlan

Save: TypeAlias = Callable[[Path], object]
"""Function that writes weights into the empty directory that it is given, e.g. `model.save_pretrained`."""

TensorSource: TypeAlias = "Mapping[str, Tensor] | Module | Callable[[], Iterable[tuple[str, Tensor]]]"
"""State dict, module, or function that gives the names and tensors anew, in the same order, at each call."""

WeightSource: TypeAlias = "Manifest | Path | str | Save | TensorSource | None"


@dataclass(frozen=True, slots=True)
class Publication:
    """Publication: one publish of one run, with the calls that its publisher may make at the service meanwhile."""

    client: ServiceClient
    run_id: str
    term: int
    version: int
    on_wait: OnWait | None = None

    def state(self, timeout_s: float | None = None) -> RunState:
        """Read the whole state of the run."""
        return self.client.run(self.run_id, timeout_s=timeout_s)

    def announce(self, plan: "CollectivePlan", timeout_s: float | None = None) -> None:
        """Announce a collective update to the workers. Raises VersionConflict, StaleTerm, InvalidField."""
        self.client.plan_collective(self.run_id, term=self.term, plan=plan, timeout_s=timeout_s)

    def notices(self, doing: str) -> WaitNotices:
        """Make notices that say on whom the publish waits."""
        return WaitNotices(f"publishing version {self.version}: {doing}", self.client.target, self.on_wait)


class WeightPublisher(Protocol):
    """Publisher of weights for the engines, which also removes old ones; `trainer_client.publish` has several."""

    def offer(self, source: WeightSource, publication: Publication) -> Manifest:
        """Make the weights available and return their manifest; the weights that it names stay unchanged."""

    def offer_again(self, version: int, publication: Publication) -> Manifest:
        """Make the weights of an older version available as the publication's. Raises InvalidField if they are gone."""

    def published(self, manifest: Manifest, *, committed_steps: int) -> None:
        """Note that the service offers these weights now; the steps below `committed_steps` are in them."""

    def checkpointed(self, steps: int) -> None:
        """Note that no resume goes back before step `steps` any more."""

    def resumed(self, next_step: int) -> None:
        """Abandon versions that were published after more than `next_step` steps."""


@runtime_checkable
class RepeatingPublisher(WeightPublisher, Protocol):
    """Publisher of weights that engines can miss; it can send the last ones again."""

    def repeats(self, version: int) -> bool:
        """True when an engine that has missed `version` can get it by `repeat` only, and `repeat` can send it."""

    def repeat(self, publication: Publication) -> Manifest:
        """Make the last version's weights available once more, as the publication's version.

        Raises what `offer` raises.
        """
