"""Term of a run that this process belongs to: that of its rollout function, or the one that its first call met.

The rollout function, the training program and the hook after a save run in processes of their own. They share no
memory, and no folder that a job's successor would not use as well. So each keeps the term that it knows first.

Invariant: a process never acts in a term that another trainer began after it. A process whose run was taken over
before its own first call cannot notice that.
"""

import threading

from buffer_wire.errors import StaleTerm
from trainer_client.integrations.miles.settings import Settings

_lock = threading.Lock()
_terms: dict[tuple[str, str], int] = {}


def taken_over(settings: Settings, term: int) -> None:
    """Record that this process's rollout function has resumed the run; everything else in the process belongs to its
    term.
    """
    with _lock:
        _terms[settings.address, settings.run_id] = term


def term_of(settings: Settings, current: int) -> int:
    """Return this process's term of a run that is at term `current`. Raises StaleTerm when it is another one."""
    with _lock:
        term = _terms.setdefault((settings.address, settings.run_id), current)
    if term != current:
        raise StaleTerm(term, current)
    return term
