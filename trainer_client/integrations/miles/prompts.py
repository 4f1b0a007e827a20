"""Prompts from the framework's data source, as the tasks that a feeder submits.

Invariant: after a restart each prompt group of the data source has been submitted exactly once, whatever place the
source itself was put back to. Its position travels with the run's cursor. The position of Miles' and slime's own data
sources (epoch, offset, group and sample index) is set again. Any other source is drawn from until the next due group
index.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from buffer_wire.errors import InvalidField
from trainer_client.integrations.miles.contract import Args, DataSource, PromptGroup
from trainer_client.tasks import Task

logger = logging.getLogger("trainer_client.integrations.miles")

POSITION = ("epoch_id", "sample_offset", "sample_group_index", "sample_index")


class PromptTasks:
    """Tasks from a data source, in its order; an iterable that can save its place and go back to it."""

    def __init__(self, args: Args, source: DataSource, task_of: Callable[[PromptGroup], Task]) -> None:
        self._args = args
        self._source = source
        self._task_of = task_of
        self._next_group: int | None = None
        """Group index that comes next, as far as it is known."""

    def __iter__(self) -> Iterator[Task]:
        while groups := self._source.get_samples(1):
            for group in cast("Sequence[PromptGroup]", groups):
                index = group[0].group_index
                if self._is_due(index):
                    self._next_group = None if index is None else index + 1
                    yield self._task_of(group)

    def _is_due(self, index: int | None) -> bool:
        if index is None or self._next_group is None or index == self._next_group:
            return True
        if index > self._next_group:
            raise InvalidField(
                "data_source.group_index",
                index,
                f"{self._next_group}, where the run stands: the data source was put back to a later place",
            )
        return False

    def state(self) -> bytes:
        """Return the source's place after the last task."""
        return json.dumps({"next_group": self._next_group, "position": self._position()}).encode()

    def load_state(self, state: bytes) -> None:
        """Put the source back to the place of `state`."""
        known = json.loads(state) if state else {}
        self._next_group = known.get("next_group")
        position = known.get("position")
        if position and self._position() is not None:
            for name, value in position.items():
                setattr(self._source, name, value)
            dataset = getattr(self._source, "dataset", None)
            if getattr(self._args, "rollout_shuffle", False) and dataset is not None:
                dataset.shuffle(position["epoch_id"])
            logger.info("the data source goes on at prompt group %s, where the run stands", self._next_group)

    def _position(self) -> dict[str, int] | None:
        found = {name: getattr(self._source, name, None) for name in POSITION}
        return None if None in found.values() else found  # type: ignore[return-value]  # no None is left
