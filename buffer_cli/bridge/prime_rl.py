"""`rollout-buffer bridge prime-rl`: the options of the command line become a Bridge, which runs until its end."""

import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffer_cli.access import access
from buffer_cli.exits import exit_code
from buffer_service.observability import logs
from rollout_workers.functions import load
from trainer_client import BufferClient, ClientOptions
from trainer_client.integrations.prime_rl import Bridge, BridgeOptions, Packing
from trainer_client.publish import FilesPublisher


def run_prime_rl(given: dict[str, Any]) -> int:
    """Run a bridge; returns its exit code."""
    level = os.environ.get("RB_LOG_LEVEL", "info")
    logs.configure(level, os.environ.get("RB_LOG_FORMAT", "console"))
    logging.getLogger("trainer_client").setLevel(level.upper())
    # A console script does not have the working directory on its path, and functions of tasks live there.
    sys.path.insert(0, str(Path.cwd()))
    return exit_code(lambda: _run(given))


def _run(given: dict[str, Any]) -> int:
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
    client_options = ClientOptions(**asdict(access()), timeout_s=20)
    with publisher, BufferClient(given["address"], client_options) as client:
        bridge = Bridge(client, given["run_id"], options, tasks=functions["tasks"], publisher=publisher)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: bridge.stop())
        bridge.run()
    return 0
