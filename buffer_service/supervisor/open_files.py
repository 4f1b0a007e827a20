"""The limit of open files of a process, held against the connections that the service is to take.

A process at its limit accepts nothing: whoever connects hangs until others leave. So there are fewer connections than
files, and who comes beyond them is refused. Child processes inherit the limit.
"""

import resource
from dataclasses import dataclass

import structlog

from buffer_service.admin.server import MAX_REQUESTS, SPARE
from buffer_service.settings import Settings

log = structlog.get_logger(__name__)

OTHER_FILES = 64
"""Files that a process has open beside its clients' connections. About 30 are open all the time.

They are connections to the store and its Sentinels, pipes, sockets that listen, metrics, certificates, and files that
are read now and then.
"""

FILES_OF_A_PROCESS = 4
"""Files that the supervisor has open for each rpc process."""

LEAST_CONNECTIONS = 16


class TooFewFiles(RuntimeError):
    """The limit of open files leaves no connections to speak of; the message names it."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Largest numbers of connections that an rpc process and the admin page may hold at once."""

    rpc: int
    admin: int


def connections(settings: Settings) -> Connections:
    """Numbers of connections that the settings ask for, or fewer where the limit of open files leaves no more.

    The limit is raised as far as it may be. Raises TooFewFiles.
    """
    others = OTHER_FILES + FILES_OF_A_PROCESS * settings.rpc_processes
    files = _raised(max(settings.max_connections, MAX_REQUESTS + SPARE) + others)
    rpc, admin = min(settings.max_connections, files - OTHER_FILES), min(MAX_REQUESTS, files - others - SPARE)
    if min(rpc, admin) < min(LEAST_CONNECTIONS, settings.max_connections):
        raise TooFewFiles(
            f"this process may open {files} files (RLIMIT_NOFILE, ulimit -n) and needs {others} beside connections, so "
            f"that max_connections of {settings.max_connections} leaves less than {LEAST_CONNECTIONS}; raise the limit"
        )
    if rpc < settings.max_connections or admin < MAX_REQUESTS:
        log.warning(
            "fewer connections than asked for: the limit of open files (RLIMIT_NOFILE, ulimit -n) leaves no more",
            open_files=files,
            max_connections=settings.max_connections,
            connections_of_a_process=rpc,
            connections_of_the_admin_page=admin,
        )
    return Connections(rpc, admin)


def _raised(wanted: int) -> int:
    """The soft limit, raised to `wanted` or to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max(soft, wanted)
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):
        # The kernel has a bound of its own below the hard limit (macOS).
        return soft
    return raised
