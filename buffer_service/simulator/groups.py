"""A group on its way through the simulation."""

from buffer_service.domain.gate import age_milli
from buffer_service.domain.policy import StalenessMeasure


class SimulatedGroup:
    """A group that is being generated, or waits for the trainer. Slots, for there are many of them.

    `sequence`, `age_milli` and the versions are what the domain's indexes and rules ask of a group.
    """

    __slots__ = (
        "begun",
        "drawn",
        "head",
        "incarnation",
        "lease",
        "left",
        "loaded",
        "longest",
        "mean_milli",
        "number",
        "pending",
        "sequence",
        "tail",
        "tokens",
        "total_duration",
        "version_time",
    )

    def __init__(
        self, number: int, head: int, durations: list[float], tokens: int, longest: int, *, surplus: int = 0
    ) -> None:
        self.number = number
        """Number in the order of starts, from 0."""
        self.loaded = head
        """Version of the engine when the group was leased."""
        self.head = head
        self.tail = head
        self.mean_milli = head * 1_000
        self.pending = durations
        """Durations of the responses that wait for a slot, last one first."""
        self.left = len(durations) - surplus
        """Responses that have to end before it is complete."""
        self.begun: dict[int, tuple[float, float]] = {}
        """Responses in slots, by ticket: duration, and what was taken from `version_time` at the start. Of groups with
        surplus responses only.
        """
        self.drawn = tokens * self.left / len(durations) if surplus else tokens
        """Tokens of as many of its responses as are trained, whichever these are."""
        self.tokens = tokens
        """Tokens of its responses; without the surplus ones when it is complete."""
        self.longest = longest
        self.total_duration = sum(durations)
        self.version_time = 0.0
        """∫ version dt over its responses' times in slots."""
        self.sequence = 0
        """Number in the order of arrivals at the queue, set when it is queued; in the order of submission that of
        leases, set with the lease.
        """
        self.lease: object = None
        """The buffer's own."""
        self.incarnation = 0
        """Number of times that its task was started anew; set with the lease."""

    def begin(self, version: int) -> None:
        """Its first response starts under that version."""
        self.head = self.tail = version
        self.mean_milli = version * 1_000

    def complete(self, version: int) -> None:
        """Its last response ended under that version."""
        self.tail = version
        self.mean_milli = min(version * 1_000, max(0, int(self.version_time / self.total_duration * 1_000 + 1e-6)))

    def cut(self) -> None:
        """Forget the responses that have not ended, as enough have."""
        unended = [*self.pending, *(duration for duration, _ in self.begun.values())]
        self.tokens -= round(sum(unended))
        self.total_duration -= sum(unended)
        self.version_time += sum(stamp for _, stamp in self.begun.values())
        self.pending.clear()
        self.begun.clear()

    def age_milli(self, measure: StalenessMeasure) -> int:
        """The version by which it is measured, in milli-versions."""
        return age_milli(measure, head=self.head, tail=self.tail, mean_milli=self.mean_milli)
