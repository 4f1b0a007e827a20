"""A trainer whose loader waits for a batch that never comes, until it is killed: address and run as arguments."""

import os
import sys
from pathlib import Path

from torch.utils.data import DataLoader

from trainer_client import BufferClient
from trainer_client.dataset import BufferDataset, follow


def say_pid(_: int) -> None:
    """The worker's process id, for who looks after it; whole or not there."""
    path = Path(os.environ["PID_FILE"])
    part = path.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(path)


if __name__ == "__main__":
    address, run_id = sys.argv[1:]
    with BufferClient(address) as client, client.session(run_id) as session:
        dataset = BufferDataset[object](address, run_id, start=session.start)
        loader = DataLoader(dataset, batch_size=None, num_workers=1, worker_init_fn=say_pid)
        next(follow(session, loader))
