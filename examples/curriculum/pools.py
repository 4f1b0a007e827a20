"""Pools of tasks by difficulty, drawn by pass rate: what is always right or always wrong teaches nothing.

A pool is drawn in proportion to p · (1 − p), the variance of a sample that is right with probability p. A floor lets a
pool that is too hard today be looked at again. p is a moving mean over the pool's groups, filtered and dropped ones
included.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence

from examples.demo.loop import GROUP_SIZE
from examples.demo.tasks import MAX_ANSWER_TOKENS, ChainSums
from examples.demo.vocabulary import EOS_ID
from trainer_client import SamplingParams, Task

POOLS: Mapping[str, tuple[int, int]] = {"easy": (2, 1), "wider": (2, 2), "hard": (4, 2)}
"""Terms and digits, at most, by name."""

FLOOR = 0.02
MEMORY = 0.9
"""Part of a pool's pass rate that the next group leaves as it is."""


class Pools:
    """Endless tasks from the pools; an iterable that hears what became of them. `adaptive` False: each as often."""

    def __init__(self, seed: int, *, adaptive: bool = True) -> None:
        self._seed = seed
        self._adaptive = adaptive
        self._sums = {
            name: ChainSums(seed + at, max_terms=terms, max_digits=digits)
            for at, (name, (terms, digits)) in enumerate(POOLS.items())
        }
        self.drawn = dict.fromkeys(POOLS, 0)
        """Tasks that were drawn from each pool: the index of its next one."""
        self.rates = dict.fromkeys(POOLS, 0.5)

    def __iter__(self) -> Iterator[Task]:
        while True:
            # Of the number of the draw alone: after a restart the same one comes.
            rng = random.Random(f"{self._seed} {sum(self.drawn.values())}")
            (name,) = rng.choices(list(POOLS), [self._weight(name) for name in POOLS])
            task = self._sums[name][self.drawn[name]]
            self.drawn[name] += 1
            yield Task(
                prompt_token_ids=task.prompt_ids,
                group_size=GROUP_SIZE,
                sampling=SamplingParams(max_new_tokens=MAX_ANSWER_TOKENS, temperature=1.0, stop_token_ids=[EOS_ID]),
                environment=name,
                metadata={"answer": task.answer, "pool": name},
            )

    def report(
        self,
        task_id: str,  # noqa: ARG002
        metadata: Mapping[str, object],
        rewards: Sequence[float],
        disposition: str,  # noqa: ARG002
    ) -> None:
        """Follow the pool's pass rate; a task that failed says nothing of it."""
        if rewards:
            name = str(metadata["pool"])
            self.rates[name] = MEMORY * self.rates[name] + (1 - MEMORY) * sum(rewards) / len(rewards)

    def state(self) -> bytes:
        """Return all that the next draw depends on."""
        return json.dumps([self.drawn, self.rates]).encode()

    def load_state(self, state: bytes) -> None:
        """Go on from there."""
        self.drawn, self.rates = json.loads(state)

    def _weight(self, name: str) -> float:
        rate = self.rates[name]
        return FLOOR + rate * (1 - rate) if self._adaptive else 1.0
