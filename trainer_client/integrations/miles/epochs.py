"""Epoch of a run that this process belongs to: that of its rollout function, or the one that its first call met.

The rollout function, the training program and the hook after a save run in processes of their own. They share no
memory, and no folder that a job's successor would not use as well. So each keeps the epoch that it knows first.

Invariant: a process never acts in an epoch that another trainer began after it. A process whose run was taken over
before its own first call cannot notice that.
"""

import threading

from buffer_wire.errors import StaleEpoch
from trainer_client.integrations.miles.settings import Settings

_lock = threading.Lock()
_epochs: dict[tuple[str, str], int] = {}


def taken_over(settings: Settings, epoch: int) -> None:
    """Record that this process's rollout function has resumed the run; everything else in the process belongs to its
    epoch.
    """
    with _lock:
        _epochs[settings.address, settings.run_id] = epoch


def epoch_of(settings: Settings, current: int) -> int:
    """Return this process's epoch of a run that is at epoch `current`. Raises StaleEpoch when it is another one."""
    with _lock:
        epoch = _epochs.setdefault((settings.address, settings.run_id), current)
    if epoch != current:
        raise StaleEpoch(epoch, current)
    return epoch
