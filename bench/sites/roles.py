"""Processes at the workers' site: they push, pull, fetch weights, and run a relay."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import ours
from bench.roles import Handler
from bench.sites.world import FAR, enter
from rollout_buffer.v1 import weights_pb2
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.transfer import rates

_DEADLINE_S = 600.0
_START_S = 30.0


def far_producer(namespace: str, address: str) -> dict[str, Handler]:
    """Command `produce` of bench.ours, from the workers' site."""
    enter(namespace)
    return ours.producer(address, "relayed")


def far_consumer(namespace: str, address: str) -> dict[str, Handler]:
    """Commands `prepare` and `consume` of bench.ours, from the workers' site."""
    enter(namespace)
    return ours.consumer(address, "relayed")


def far_workers(namespace: str) -> dict[str, Handler]:
    """Commands `fetch` (seconds until all workers have a version) and `relay` (start one anew; its URL)."""
    enter(namespace)
    relays: list[subprocess.Popen[bytes]] = []

    def fetch(folder: Path, manifest: bytes, workers: int, mirrors: Sequence[str], streams: int) -> float:
        rates.MAX_STREAMS = streams
        return asyncio.run(_fetch(folder, weights_pb2.FilesManifest.FromString(manifest), workers, mirrors))

    def relay(folder: Path, upstream: str) -> str:
        stop()
        command = [sys.executable, "-m", "buffer_cli", "relay", "--upstream", upstream, "--dir", str(folder)]
        folder.mkdir(parents=True)
        log = folder / "log"
        with log.open("wb") as said:
            relays.append(subprocess.Popen([*command, "--listen", f"{FAR}:0"], stdout=said, stderr=said))
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if found := re.search(r"serving weights\s.*?url=(\S+)\s", log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise RuntimeError(f"the relay did not start: {log.read_text()}")

    def stop() -> None:
        while relays:
            ended = relays.pop()
            ended.terminate()
            ended.wait()

    return {"fetch": fetch, "relay": relay, "stop": stop}


async def _fetch(folder: Path, manifest: weights_pb2.FilesManifest, workers: int, mirrors: Sequence[str]) -> float:
    fetchers = [WeightFetcher(folder / str(at), owner="w", keep=1, mirrors=mirrors) for at in range(workers)]
    began = time.perf_counter()
    await asyncio.gather(*(each.fetch(Version(1, 1), manifest, deadline_s=_DEADLINE_S) for each in fetchers))
    taken = time.perf_counter() - began
    for each in fetchers:
        await each.close()
    return taken
