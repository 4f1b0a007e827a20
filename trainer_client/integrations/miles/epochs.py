"""Which epoch of a run this process belongs to: what the rollout function took over, or what the first call met.

The rollout function, the training program and the hook after a save run in processes of their own, which share neither
memory nor a folder that a job's successor would not use as well. So each holds on to the epoch that it knows first.

Invariant: a process never acts in an epoch that another trainer began after it; one whose run was taken over before
its own first call cannot tell.
"""

import threading

from buffer_wire.errors import StaleEpoch
from trainer_client.integrations.miles.settings import Settings

_lock = threading.Lock()
_epochs: dict[tuple[str, str], int] = {}


def taken_over(settings: Settings, epoch: int) -> None:
    """This process's rollout function has resumed the run, and with it everything else in the process."""
    with _lock:
        _epochs[settings.address, settings.run_id] = epoch


def epoch_of(settings: Settings, current: int) -> int:
    """This process's epoch of a run that is at epoch `current`. Raises StaleEpoch when it is another one."""
    with _lock:
        epoch = _epochs.setdefault((settings.address, settings.run_id), current)
    if epoch != current:
        raise StaleEpoch(epoch, current)
    return epoch
