"""A worker that is killed when the first of its groups lies in the store, before it is pushed.

python -m tests.workers.dying_writer ADDRESS RUN FOLDER
"""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.main import run_worker
from rollout_workers.options import WorkerOptions
from rollout_workers.service.parcels import Parcel
from rollout_workers.service.pusher import Pusher
from tests.workers.building import REWARD


def die(_: Pusher, parcel: Parcel) -> NoReturn:
    assert parcel.direct
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    Pusher._join = die  # type: ignore[method-assign,assignment]
    engine = SimulatedOptions(tokens_per_s=20_000.0, length_median=2_500.0, length_sigma=0.0)
    run_worker(
        WorkerOptions(
            address=sys.argv[1],
            run_id=sys.argv[2],
            weights_dir=Path(sys.argv[3]),
            reward=REWARD,
            # A worker of the same name frees its leases.
            worker_id="w",
            groups_per_engine=1,
            simulated=engine,
        )
    )
