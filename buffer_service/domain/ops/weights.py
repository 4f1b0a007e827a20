"""Operations on weight versions: publishes, collective plans, and reports of engines."""

from collections.abc import Sequence
from dataclasses import dataclass

from buffer_wire.revision import Revision


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """Identity of a set of weights."""

    term: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Publish:
    """Make (term, version) the published weights. `manifest` is a serialized wire WeightManifest, empty for none."""

    term: int
    version: int
    manifest: bytes
    commit_through: int | None
    clock: "TrainerClock | None" = None
    """The trainer's word on its time; None: it says nothing."""


@dataclass(frozen=True, slots=True)
class TrainerClock:
    """Times of a trainer since its term began, in ms by its clock: working, and waiting for batches."""

    busy_ms: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class PlanCollective:
    """Announce a collective update to (term, version), or its next phase.

    `plan` is a serialized wire CollectivePlan, opaque here.
    """

    term: int
    version: int
    plan: bytes


@dataclass(frozen=True, slots=True)
class Published:
    """Result of a publish."""

    revision: Revision
    published: WeightVersion
    committed_steps: int


@dataclass(frozen=True, slots=True)
class WeightsView:
    """The published weights of a run, and the collective update to newer ones that is under way (empty: none)."""

    revision: Revision
    published: WeightVersion
    manifest: bytes
    paused: bool
    plan: bytes = b""
    may_load: bool = True
    """False while as many engines as the policy allows are out of service for a load."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Report of a worker on an engine; `state` is one of starting, ready, loading, quarantined, stopped."""

    engine_id: str
    worker_id: str
    state: str
    loaded: WeightVersion
    reloads: int
    last_reload_ms: int
    last_error: str
    errors: int
    membership: int = 0
    """The process group that it belongs to; 0: none."""
    prepared: WeightVersion | None = None
    """The planned version that it is ready to receive."""
    weights_url: str = ""
    """Address at which peers get the versions that its worker has fetched; empty: nowhere."""
    weights_from: str = ""
    """Source of the files of the last version that were fetched for it, and why, in words; empty: none were."""
    decoded_tokens: int = 0
    """Tokens that the worker was sent. This and the next two count since the worker began with the engine."""
    decode_busy_ms: int = 0
    """Time in which at least one request decodes."""
    decode_request_ms: int = 0
    """Time of each request that decodes, summed."""
    reload_counters: Sequence[int] = ()
    """Counters of the engine's reloads since the worker began with it, as totals.RELOAD_PHASES says; empty: unreported.

    Like `wants_load`, said with a report, not part of a view.
    """
    wants_load: bool = False
    """True to ask for a permit among the engines that are out of service for a load.

    Said with a report, not part of a view.
    """
    running_samples: int = 0
    """Samples of its worker that run on it."""
    max_running_samples: int = 0
    """Samples of the training that its worker lets run on it; 0: not known."""
    kv_usage_milli: int = 0
    """Part of its KV cache in use, in thousandths."""
    moved_samples: int = 0
    """Samples of its leases that other engines took over. This and the next two count as decoded_tokens does."""
    surplus_samples: int = 0
    """Samples beyond their group's size that were cut off."""
    surplus_tokens: int = 0
    """Tokens of those."""
    takes_buckets: bool = False
    """True when it takes a broadcast's tensors in buckets."""
    silent_ms: int = 0
    """Time since the last report, in ms; set in a view."""


@dataclass(frozen=True, slots=True)
class EngineReported:
    """Result of an engine's report."""

    revision: Revision
    published: WeightVersion
    may_load: bool
