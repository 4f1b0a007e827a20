"""Revisions as a run's own service proves them, for tests in which the store has to be behind."""

from typing import Any

import redis

from buffer_service.store.keys import index_key
from buffer_wire.revision import Revision
from tests.oracle.rules.proofs import prove
from tests.support.service import ServiceProcess


def proven(service: ServiceProcess, run_id: str, revision: int) -> Revision:
    """The revision with the proof that the service gives out with it."""
    client: Any = redis.Redis(unix_socket_path=str(service.data_dir / "store" / "store.sock"))
    try:
        return prove(client.hget(index_key(run_id, "run"), "secret").decode(), revision)
    finally:
        client.close()
