"""Weights as patches beside whole files: bytes that a worker fetches, and seconds of publish and fetch.

    python -m bench.patches                       # a model of Qwen2.5-0.5B's shapes, bfloat16, a minute or two
    python -m bench.patches --layers 2 --width 64 --vocabulary 512

The model is random, its updates are of three kinds: `adam` moves every float32 master weight by up to the rate, as a
step of Adam does, and makes it bfloat16 anew; `dense` adds noise of a hundredth of a weight's size; `none` changes
nothing. Publisher and worker are real, in two threads of this process, over loopback; `--mbps` caps the fetches. Whole
and patched versions alternate. Writes bench/results/patches.json and the table in docs/weights_results.md.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import structlog
import torch

from bench.tables import put, table, write_rows
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.transfer.client import WeightClient
from trainer_client.manifest import FilesManifest
from trainer_client.publish.files import FilesPublisher
from trainer_client.publish.saving import save_tensors

_RESULTS = Path(__file__).parent / "results" / "patches.json"
_KINDS = ("adam 1e-6", "adam 1e-5", "dense", "none")
_INIT = 0.02
_WAYS = ("whole", "patches")


class Model:
    """Weights of a decoder: float32 masters, which updates move, and what is published of them."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        wide, narrow = width * 38 // 7, max(width // 7, 8)
        shapes = {"embed": (vocabulary, width)}
        for layer in range(layers):
            for name, out in (("q", width), ("k", narrow), ("v", narrow), ("o", width), ("gate", wide), ("up", wide)):
                shapes[f"{layer}.{name}"] = (out, width)
            shapes[f"{layer}.down"] = (width, wide)
        self.masters = {name: torch.randn(shape) * _INIT for name, shape in shapes.items()}

    def update(self, kind: str) -> None:
        """Move the masters as one step of `kind` does."""
        for master in self.masters.values():
            if kind.startswith("adam"):
                master.add_(torch.empty_like(master).uniform_(-1, 1), alpha=float(kind.split()[1]))
            elif kind == "dense":
                master.addcmul_(master, torch.randn_like(master), value=0.01)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and bfloat16 tensors."""
        for name, master in self.masters.items():
            yield name, master.to(torch.bfloat16)


async def measure(model: Model, kind: str, updates: int, mbps: float, root: Path) -> list[dict[str, Any]]:
    """Publish and fetch versions both ways; a row for each way."""
    seen: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in _WAYS}
    with (
        FilesPublisher(root / "whole", serve="http", keep=2) as whole,
        FilesPublisher(root / "patches", serve="http", keep=2, patches=1) as patched,
    ):
        publishers = {"whole": whole, "patches": patched}
        clients = {way: WeightClient(max_mbps=mbps) for way in _WAYS}
        fetchers = {way: WeightFetcher(root / f"worker-{way}", owner="w", keep=2, client=clients[way]) for way in _WAYS}
        for number in range(updates + 1):
            if number:
                model.update(kind)
            for way, publisher in publishers.items():
                began = time.monotonic()
                manifest = await asyncio.to_thread(_published, publisher, model, number)
                published = time.monotonic()
                before = clients[way].received_bytes
                directory = await fetchers[way].fetch(Version(1, number), manifest.listing(), deadline_s=600)
                fetchers[way].hold("engine", directory)
                fetched = time.monotonic()
                size = sum(file.size_bytes for file in manifest.files)
                if number:
                    came = clients[way].received_bytes - before
                    seen[way].append((size, came, published - began, fetched - published))
        for fetcher in fetchers.values():
            await fetcher.close()
    return [
        dict(
            zip(
                ("update", "way", "model_bytes", "fetched_bytes", "publish_s", "fetch_s"),
                (kind, way, *(round(median(column), 3) for column in zip(*rows, strict=True))),
                strict=True,
            )
        )
        for way, rows in seen.items()
    ]


def _published(publisher: FilesPublisher, model: Model, number: int) -> FilesManifest:
    def save(directory: Path) -> None:
        save_tensors(model.tensors, directory)

    manifest = publisher.write(save, term=1, version=number)
    publisher.published(manifest, committed_steps=number)
    publisher.checkpointed(number)
    return manifest


def main() -> None:
    """Measure all kinds of updates; print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--updates", type=int, default=3, help="updates of each kind; medians are shown")
    parser.add_argument("--mbps", type=float, default=1_000, help="cap of the fetches in megabits/s; 0: none")
    parser.add_argument("--kinds", nargs="+", default=_KINDS, choices=_KINDS)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    model = Model(options.layers, options.width, options.vocabulary)
    rows = []
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(prefix="bench-patches-") as root:
            rows += asyncio.run(measure(model, kind, options.updates, options.mbps, Path(root)))
        for row in rows[-len(_WAYS) :]:
            print(row, flush=True)
    write_rows(options.out, {"updates": options.updates, "mbps": options.mbps, "rows": rows})
    if options.out == _RESULTS:
        put("bench-patches", _table(rows))


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = ("update", "model, MB", "fetched, MB", "of it", "publish, s: whole", "patches", "fetch, s: whole", "patches")
    lines = []
    for whole, patches in zip(rows[::2], rows[1::2], strict=True):
        share = patches["fetched_bytes"] / patches["model_bytes"]
        megabytes = (patches["model_bytes"] / 1e6, patches["fetched_bytes"] / 1e6)
        lines.append(
            (
                patches["update"],
                *(f"{value:,.1f}" for value in megabytes),
                f"{share:.1%}",
                *(f"{row[what]:.1f}" for what in ("publish_s", "fetch_s") for row in (whole, patches)),
            )
        )
    return table(head, lines)


if __name__ == "__main__":
    main()
