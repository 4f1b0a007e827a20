"""The table of engine kinds: what each line promises is there, and nobody but the table knows a kind."""

import asyncio
import tomllib
from pathlib import Path

import numpy as np
import pytest

from rollout_buffer.v1 import weights_pb2
from rollout_workers.engine.registry import KINDS, SERVERS, Kind
from rollout_workers.worker import Worker
from tests.engine.fake_vllm import FakeVllm
from tests.support.tiny_model import write_safetensors
from tests.workers.building import length_reward, options, task, weight_files
from tests.workers.fake_service import FakeService

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_folder_of_every_kind_offers_what_its_line_promises(kind: Kind) -> None:
    hosts = kind.hosts
    assert callable(hosts.check)
    assert hasattr(hosts, "host_at") is ("url" in kind.sources)
    assert hasattr(hosts, "own_hosts") is bool({"launch", "simulate"} & set(kind.sources))


async def test_worker_brings_vllm_to_published_weights_and_names_them_in_its_groups(
    fake: FakeService, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": np.zeros((2, 3), np.float32)})
    content = {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()}
    async with FakeVllm() as server:
        server.made = 1_000
        made = options(
            fake.address,
            tmp_path,
            simulated=None,
            engine_urls=(server.url,),
            engine_kind="vllm",
            pause_mode="abort",
        )
        running = asyncio.create_task((worker := Worker(made, reward=length_reward)).run())
        await fake.submit(task("before", group_size=2))
        await fake.until(lambda: "before" in fake.results())
        files = weight_files(tmp_path / "published", content)
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(lambda: fake.engine().loaded.version == 1)
        await fake.submit(task("after", group_size=2))
        await fake.until(lambda: "after" in fake.results())
        worker.stop()
        await running
    versions = {
        name: {span.version.version for sample in group.header.samples for span in sample.spans}
        for name, group in fake.results().items()
    }
    assert versions == {"before": {0}, "after": {1}}
    assert server.label == "1.1"


def test_every_folder_of_an_engine_is_a_line_of_the_table() -> None:
    folders = {path.parent.name for path in (ROOT / "rollout_workers" / "engine").glob("*/hosts.py")}
    assert folders == set(KINDS)


def test_lint_keeps_every_kind_to_its_own_folder() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (protected,) = [contract for contract in contracts if contract["type"] == "protected"]
    assert set(protected["protected_modules"]) == {f"rollout_workers.engine.{name}" for name in KINDS}
    assert protected["allowed_importers"] == []


def test_servers_are_the_kinds_that_have_urls() -> None:
    assert tuple(name for name, kind in KINDS.items() if "url" in kind.sources) == SERVERS
