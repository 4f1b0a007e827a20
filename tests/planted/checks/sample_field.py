"""Field `engine_calls` of a sample: made by the worker, kept by partial rollouts, checked, read by the trainer."""

from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from buffer_wire.validate import check_group
from rollout_workers.generation.samples import GroupProgress
from tests.workers.building import generated, lease, task
from tests.workers.test_samples import PROMPT, version_of
from trainer_client.batch import Group


def grown() -> GroupProgress:
    """A group of one sample that took an aborted call, a partial rollout, and a second call."""
    first = GroupProgress(lease(task(group_size=1)), PROMPT)
    first.samples[0].append(generated(0, [5, 6], ("1.1", 0, 2), finish="abort"), version_of)
    second = GroupProgress(lease(task(group_size=1), attempt=2, partial_rollout=first.to_partial_rollout("w")), PROMPT)
    second.take_partial_rollout()
    second.samples[0].append(generated(0, [7], ("1.1", 0, 1)), version_of)
    return second


def test_the_trainer_reads_what_the_workers_counted() -> None:
    header, payload = grown().to_group([1.0], "w")
    sample: Any = Group(header.SerializeToString(), memoryview(b"".join(payload)), 1, 1, 1, 1).samples[0]
    assert sample.engine_calls == 2
    assert sample.token_ids.tolist() == np.array([1, 2, 3, 5, 6, 7]).tolist()


def test_a_count_beyond_the_bound_is_refused_by_name() -> None:
    header, payload = grown().to_group([1.0], "w")
    sample: Any = header.samples[0]
    sample.engine_calls = 1 << 23
    with pytest.raises(InvalidField, match="engine_calls"):
        check_group(header, sum(map(len, payload)))
