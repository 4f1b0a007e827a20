"""`rollout-buffer bridge prime-rl`: the options of the command line become a Bridge, which runs until its end."""

import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffer_cli.options import ServiceOptions
from buffer_service.observability import logs
from rollout_workers.functions import load
from trainer_client import BufferClient, ClientOptions
from trainer_client.integrations.prime_rl import Bridge, BridgeOptions, Packing
from trainer_client.publish import FilesPublisher


def run_prime_rl(run_id: str, service: ServiceOptions, **given: Any) -> None:  # noqa: ANN401 - options of a bridge
    """Run a bridge until its end."""
    level = os.environ.get("RB_LOG_LEVEL", "info")
    logs.configure(level, os.environ.get("RB_LOG_FORMAT", "console"))
    logging.getLogger("trainer_client").setLevel(level.upper())
    # A console script does not have the working directory on its path, and functions of tasks live there.
    sys.path.insert(0, str(Path.cwd()))
    functions = {name: load(f"--{name}", given[name]) if given[name] else None for name in ("tasks", "advantage")}
    packing = Packing(
        advantage=functions["advantage"],
        **{name: given[name] for name in ("seq_len", "data_ranks", "pad_to_multiple_of", "temperature")},
    )
    options = BridgeOptions(
        packing=packing,
        **{name: given[name] for name in ("output_dir", "checkpoints", "batch_groups", "max_steps", "keep_rollouts")},
    )
    publisher = FilesPublisher(
        given["weights"] or options.output_dir / "published",
        keep=given["keep_versions"],
        **{name: given[name] for name in ("serve", "host", "port", "advertised_host")},
    )
    # Not longer, for what a client gives up the bridge tries again, and a signal waits for it.
    client_options = ClientOptions(**asdict(service.access), timeout_s=20)
    with publisher, BufferClient(service.address, client_options) as client:
        bridge = Bridge(client, run_id, options, tasks=functions["tasks"], publisher=publisher)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: bridge.stop())
        bridge.run()
