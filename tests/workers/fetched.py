"""Weights to fetch, and what a fetcher has left in its directory."""

from pathlib import Path

from rollout_workers.versions import Version
from rollout_workers.weights.fetching.pins import LOCKS

CONTENT = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 4096, "sub/tokenizer.json": b"{}"}
V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def read(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def left_over(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if ".part-" in path.name]


def what_is_in(root: Path) -> list[str]:
    """All but the locks of pins."""
    return [path.name for path in root.iterdir() if path.name != LOCKS]
