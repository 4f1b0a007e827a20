"""The table of engine kinds: what each line promises is there, and nobody but the table knows a kind."""

import asyncio
import tomllib
from pathlib import Path

import pytest

from rollout_workers.engine.registry import KINDS, SERVERS, Kind
from rollout_workers.worker import Worker
from tests.engine.fake_vllm import FakeVllm
from tests.workers.building import length_reward, options, task
from tests.workers.fake_service import FakeService

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_folder_of_every_kind_offers_what_its_line_promises(kind: Kind) -> None:
    hosts = kind.hosts
    assert callable(hosts.check)
    assert hasattr(hosts, "host_at") is ("url" in kind.sources)
    assert hasattr(hosts, "own_hosts") is bool({"launch", "simulate"} & set(kind.sources))


async def test_worker_works_for_a_run_with_vllm(fake: FakeService, tmp_path: Path) -> None:
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
        await fake.submit(task("t", group_size=2))
        await fake.until(lambda: len(fake.results()) == 1)
        worker.stop()
        await running


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
