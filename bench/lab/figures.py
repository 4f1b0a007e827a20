"""Published staleness and length bias, every row, and the same setting in our terms.

The source is "Predicting and Controlling Staleness in Fully Asynchronous RL Training" (Applied Compute, July 2026):
Qwen3-8B, GRPO, DAPO math. It gives inputs of real runs as rounded means of logged series. What a table does not state
and we had to take from another one is named in `assumed`. Group sizes are stated nowhere: GROUP_SIZE is ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from buffer_service.observability.estimate.closed_forms import Prediction, queue_drop, small_batch_period
from buffer_service.simulator import Simulation, Workload
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.queue_policies import QUEUE_DROP, QUEUE_MAX, queue_policy

GROUP_SIZE = 8
WARMUP = 100


@dataclass(frozen=True, slots=True)
class Run:
    """A real training run under queue-drop: its setting, the authors' prediction if there is one, what was measured."""

    table: str
    concurrency: int
    batch_rollouts: int
    queue_factor: int
    rho: float
    tailness: float
    measured: float
    predicted: float | None = None
    predicted_pqs: float | None = None
    predicted_iqs: float | None = None
    step_s: float | None = None
    """Mean train period, seconds."""
    assumed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.table}: C {self.concurrency} B {self.batch_rollouts} q {self.queue_factor} ρ {self.rho} "
            f"M {self.tailness}"
        )

    @property
    def groups_per_batch(self) -> int:
        """N with our group size; 60 rollouts are 7."""
        return self.batch_rollouts // GROUP_SIZE

    def closed_form(self, in_flight: float = 1.0) -> Prediction:
        """Ours, where the share `in_flight` of C is decoding on average."""
        ratio = in_flight * self.concurrency / self.batch_rollouts
        return queue_drop(ratio, self.queue_factor, self.rho, self.tailness)

    def in_flight(self) -> float:
        """The share of C with which the closed form gives what was measured."""
        ours = self.closed_form()
        return (self.measured - ours.iqs) / ours.pqs

    def period_ratio(self) -> float:
        """Our train period over the ideal one: what overflow of a batch of few groups costs."""
        return small_batch_period(self.groups_per_batch, self.queue_factor, self.rho)

    def simulation(self, steps: int, seed: int = 0) -> Simulation:
        """Simulation with lognormal lengths of that tailness, and C over N as C over B is."""
        responses = self.groups_per_batch * GROUP_SIZE
        slots = round(self.concurrency * responses / self.batch_rollouts)
        lengths = Lognormal.with_tailness(self.tailness, GROUP_SIZE)
        return Simulation(
            policy=queue_policy(QUEUE_DROP, self.groups_per_batch, queue_factor=self.queue_factor),
            workload=Workload(slots, GROUP_SIZE, self.rho, lengths),
            steps=steps,
            warmup=WARMUP,
            seed=seed,
        )


def _table(name: str, *rows: tuple[float, ...], assumed: tuple[str, ...] = ()) -> Iterator[Run]:
    """Rows of a published table, in the order of Run's fields; what it does not give is left out at the end."""
    for row in rows:
        yield Run(name, *row, assumed=assumed)  # type: ignore[arg-type,misc]


_SETTING = ("concurrency", "batch_rollouts", "queue_factor", "rho")

RUNS = (
    *_table(
        "runs",
        (120, 240, 2, 0.63, 1.42, 1.26, 1.34),
        (240, 120, 2, 0.92, 1.43, 3.59, 3.86),
        (128, 128, 2, 1.07, 1.44, 3.09, 3.29),
        (240, 120, 1, 0.86, 1.42, 3.40, 3.34),
        (120, 120, 1, 0.67, 1.42, 1.92, 1.95),
        (128, 128, 1, 1.14, 1.45, 2.01, 2.24),
    ),
    *_table(
        "batch size",
        (120, 60, 1, 0.62, 1.42, 3.03, 3.38, 2.76, 0.62, 72.1),
        (120, 120, 1, 0.67, 1.42, 1.92, 1.95, 1.28, 0.67, 137.1),
        (120, 240, 1, 0.63, 1.42, 1.26, 1.35, 0.72, 0.63, 270.4),
        assumed=("concurrency", "queue_factor", "tailness"),
    ),
    *_table(
        "queue capacity",
        (128, 128, 2, 1.07, 1.44, 3.09, 3.29, 1.36, 1.93, 141.4),
        (128, 128, 1, 1.14, 1.45, 2.01, 2.25, 1.31, 0.94, 142.6),
        assumed=("concurrency", "batch_rollouts", "tailness"),
    ),
    *_table(
        "concurrency",
        (120, 120, 1, 0.67, 1.42, 1.92, 1.95, 1.28, 0.67, 137.1),
        (240, 120, 1, 0.85, 1.42, 3.15, 3.09, 2.24, 0.85, 106.4),
        assumed=("batch_rollouts", "queue_factor", "tailness"),
    ),
    *(
        Run(f"prompts of {mean} tokens", 120, 120, 1, 0.67, tailness, measured, assumed=_SETTING)
        for mean, tailness, measured in (
            (7_310, 1.35, 1.98),
            (6_740, 1.68, 2.37),
            (11_290, 1.29, 1.85),
            (10_380, 1.68, 2.22),
        )
    ),
)
"""The tables overlap: some rows are the same run, rounded otherwise."""


# ── length bias ──────────────────────────────────────────────────────────────

BIAS_CONCURRENCY = 112
BIAS_GROUPS_PER_BATCH = 16
BIAS_RHO = 0.85
SIGMAS = {50: 0.75, 90: 1.25}
SAMPLED = {50: (1_402, 8_080), 90: (1_353, 12_080)}
"""Mean of the published sampled means, and the longest response, which every row has: so it is the cap."""

FITTED = {tailness: Lognormal.with_mean(mean, SIGMAS[tailness], cap) for tailness, (mean, cap) in SAMPLED.items()}
"""Settings by published "tailness", of which no definition is known: σ, C, N and ρ are fitted to trained means and
maxima.
"""


@dataclass(frozen=True, slots=True)
class Bias:
    """A published row of the authors' simulator: lengths in tokens, sampled and trained."""

    tailness: int
    policy: str
    factor: int
    """q of queue-drop, η of queue-max."""
    sampled_mean: int
    trained_mean: int
    sampled_max: int
    trained_max: int

    def __str__(self) -> str:
        return f"tailness {self.tailness} {self.policy} {self.factor}"

    @property
    def share(self) -> float:
        """Mean length trained over sampled."""
        return self.trained_mean / self.sampled_mean

    def simulation(self, steps: int, seed: int = 0) -> Simulation:
        """Simulation in our setting."""
        factors: dict[str, int] = {"queue_factor" if self.policy == QUEUE_DROP else "max_staleness": self.factor}
        return Simulation(
            policy=queue_policy(self.policy, BIAS_GROUPS_PER_BATCH, **factors),
            workload=Workload(BIAS_CONCURRENCY, GROUP_SIZE, BIAS_RHO, FITTED[self.tailness]),
            steps=steps,
            warmup=WARMUP,
            seed=seed,
        )


BIASES = (
    Bias(50, QUEUE_DROP, 1, 1404, 1403, 8080, 8080),
    Bias(50, QUEUE_DROP, 2, 1405, 1403, 8080, 8080),
    Bias(50, QUEUE_MAX, 1, 1401, 1229, 8080, 4983),
    Bias(50, QUEUE_MAX, 2, 1399, 1259, 8080, 6555),
    Bias(50, QUEUE_MAX, 3, 1403, 1292, 8080, 8080),
    Bias(50, QUEUE_MAX, 4, 1402, 1351, 8080, 8080),
    Bias(90, QUEUE_DROP, 1, 1349, 1344, 12080, 12080),
    Bias(90, QUEUE_DROP, 2, 1357, 1352, 12080, 12080),
    Bias(90, QUEUE_MAX, 1, 1354, 897, 12080, 5430),
    Bias(90, QUEUE_MAX, 2, 1359, 962, 12080, 6388),
    Bias(90, QUEUE_MAX, 3, 1355, 1027, 12080, 7979),
    Bias(90, QUEUE_MAX, 4, 1351, 1077, 12080, 9572),
)
