"""`rollout-buffer relay`: the options of the command line become RelayOptions."""

import os
import sys
from math import isfinite
from pathlib import Path

from buffer_cli.options import WeightsOptions
from buffer_service.observability import logs
from buffer_wire.errors import InvalidField
from rollout_workers.relay.main import EXIT_OPTIONS, run_relay
from rollout_workers.relay.options import RelayOptions


def run(
    weights: WeightsOptions,
    *,
    upstreams: list[str],
    listen: str,
    directory: Path,
    max_gb: float,
    patience_s: float,
    drain_grace_s: float,
) -> int:
    """Run a relay; returns its exit code."""
    try:
        options = RelayOptions(
            tuple(upstreams),
            listen=listen,
            directory=directory,
            max_bytes=_bytes(max_gb),
            access=weights.access,
            tls_cert=weights.weights_tls_cert or "",
            tls_key=weights.weights_tls_key or "",
            max_mbps=weights.weights_max_mbps,
            patience_s=patience_s,
            drain_grace_s=drain_grace_s,
        )
    except InvalidField as error:
        sys.stderr.write(f"error: {error.message}\n")
        return EXIT_OPTIONS
    logs.configure(os.environ.get("RB_LOG_LEVEL", "info"), os.environ.get("RB_LOG_FORMAT", "console"))
    return run_relay(options)


def _bytes(gigabytes: float) -> int:
    if not isfinite(gigabytes):
        raise InvalidField("max_gb", gigabytes, "a finite number of gigabytes")
    return int(gigabytes * 1e9)
