"""Room that a relay makes of files that it gave up in the middle: of as many as it takes, and no more."""

from pathlib import Path

import pytest

from rollout_workers.relay.disk import Disk
from rollout_workers.relay.fetches import Fetches, NoRoom
from rollout_workers.weights.transfer.client import WeightClient

SIZE = 100
NAMES = [letter * 64 for letter in "abc"]


async def test_no_more_is_given_up_than_room_is_needed_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, 2 * SIZE)
    disk.open()
    client = WeightClient()
    # Nobody is there: each fetch fails at once, and keeps its place.
    fetches = Fetches(["http://127.0.0.1:1"], disk, client, patience_s=0.1)

    async def size(_digest: str) -> int:
        return sizes.pop(0)

    monkeypatch.setattr(fetches, "_size", size)
    sizes = [SIZE, SIZE, SIZE, 3 * SIZE]
    for name in NAMES:
        task = (await fetches.of(name)).task
        assert task is not None
        await task
    assert sorted(path.name for path in (tmp_path / "partial").iterdir()) == NAMES[1:]
    assert disk.used_bytes == 2 * SIZE
    with pytest.raises(NoRoom):
        await fetches.of("d" * 64)
    await fetches.close()
    await client.close()
