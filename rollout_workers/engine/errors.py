"""Errors between a worker and an inference engine.

    EngineError
    ├── EngineUnavailable    cannot be reached, or died in the middle of a request
    ├── EngineRejected       answered, and refused
    ├── EngineLoadFailed     new weights were not taken, or cannot be trusted
    ├── EngineTimeout        did not answer within a deadline
    ├── EngineMalformed      answered with something that breaks its contract
    ├── EngineUnfit          cannot be driven, whatever is repeated: a version, or how it was started
    └── EngineNotStarted     a local server did not come up

Requests that must not be sent at all (a token id outside the vocabulary) raise buffer_wire.errors.InvalidField.

Invariants: `reason` is stable and unique; every constructor takes the error's data and builds the message; `retryable`
means that the same call can succeed later on the same engine.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from rollout_workers.engine.types import GeneratedSample


class EngineError(Exception):
    """Base of this tree. `engine` is its address, as in EngineInfo."""

    reason: ClassVar[str] = "engine_error"
    retryable: bool = False
    partial: "tuple[GeneratedSample, ...]" = ()
    """Samples with tokens that arrived before `generate` failed, finished ones among them. They are as good as those of
    a call that succeeds."""

    def __init__(self, message: str, *, engine: str) -> None:
        super().__init__(f"{engine}: {message}")
        self.engine = engine


class EngineUnavailable(EngineError):
    """The connection failed. Requests in flight may or may not have run."""

    reason = "engine_unavailable"
    retryable = True

    def __init__(self, engine: str, doing: str, cause: str) -> None:
        super().__init__(f"cannot be reached while {doing}: {cause}", engine=engine)


class EngineRejected(EngineError):
    """The engine refused a call with an HTTP status. Retryable if it was full (503), not if it found fault (400)."""

    reason = "engine_rejected"

    def __init__(self, engine: str, doing: str, status: int, message: str) -> None:
        super().__init__(f"refused with status {status} while {doing}: {message}", engine=engine)
        self.status = status
        self.retryable = status in {429, 503}


class EngineLoadFailed(EngineError):
    """Weights were not loaded.

    `weights` is "kept" if the old ones still generate. It is "unknown" if the engine may hold a mixture; then it must
    not be used before a load succeeds.
    """

    reason = "engine_load_failed"

    def __init__(
        self, engine: str, path: str, version_label: str, *, cause: str, weights: Literal["kept", "unknown"]
    ) -> None:
        super().__init__(f"weights {version_label} from {path} were not loaded: {cause}", engine=engine)
        self.weights = weights


class EngineTimeout(EngineError):
    """No answer within the deadline."""

    reason = "engine_timeout"
    retryable = True

    def __init__(self, engine: str, doing: str, deadline_s: float) -> None:
        super().__init__(f"no answer within {deadline_s:g} s while {doing}", engine=engine)


class EngineMalformed(EngineError):
    """An answer broke the engine's contract; nothing of it is used."""

    reason = "engine_malformed"

    def __init__(self, engine: str, doing: str, what: str) -> None:
        super().__init__(f"unusable answer while {doing}: {what}", engine=engine)


class EngineUnfit(EngineError):
    """The engine lacks what the worker needs of it. Another version, or other flags, would mend it."""

    reason = "engine_unfit"

    def __init__(self, engine: str, why: str) -> None:
        super().__init__(f"cannot be driven: {why}", engine=engine)


class EngineNotStarted(EngineError):
    """A local server ended, or was not ready in time. `log_tail` holds the last lines of its log."""

    reason = "engine_not_started"
    retryable = True

    def __init__(self, engine: str, why: str, log_path: str, log_tail: str) -> None:
        super().__init__(f"{why}; the end of {log_path}:\n{log_tail}", engine=engine)
        self.log_tail = log_tail
