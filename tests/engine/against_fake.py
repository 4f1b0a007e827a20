"""Beginnings of tests of SglangEngine against FakeSglang."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import SampleRequest
from tests.engine.fake_sglang import FakeSglang

PROMPT = np.array([3, 4, 5], dtype=np.int32)
QUICK = ServerOptions(control_timeout_s=2, generate_timeout_s=5, abort_grace_s=0.2, reconnect_s=0.5)


@asynccontextmanager
async def connected(fake: FakeSglang, options: ServerOptions) -> AsyncIterator[SglangEngine]:
    """An engine that has asked the server what it is; that is not among what the server has received."""
    engine = SglangEngine(fake.url, options=options)
    await engine.info()
    fake.order.clear()
    fake.received.clear()
    yield engine
    await engine.close()


def request(**changes: Any) -> SampleRequest:
    """Make one of two tokens."""
    return SampleRequest(**{"sample_index": 0, "input_ids": PROMPT, "max_new_tokens": 2, **changes})
