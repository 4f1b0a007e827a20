"""Tests of which servers are driven: by their release, and by how they were started. Others are refused at once, by
name.
"""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from buffer_wire.errors import InvalidField
from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineError, EngineNotStarted, EngineUnfit
from rollout_workers.engine.hosts import RemoteHost
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.hosts import host_at
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions
from rollout_workers.engine.sglang.versions import HABITS, LEAST, release_of, text
from rollout_workers.engine.types import PauseMode
from rollout_workers.engines import open_slot
from tests.engine.against_fake import QUICK, request
from tests.engine.fake_sglang import FakeSglang
from tests.support.tiny_model import write_random_model
from tests.workers.building import options

OLDER = {habit.since: text((*habit.since[:2], habit.since[2] - 1)) for habit in HABITS}
"""Release before each release."""


async def opened(server: FakeSglang, tmp_path: Path, **more: Any) -> RemoteHost:
    host = host_at(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,), **more))
    try:
        await open_slot("e0", host)
    finally:
        await host.close()
    return host


@pytest.mark.parametrize("habit", [habit for habit in HABITS if habit.needed], ids=lambda habit: habit.what)
async def test_server_that_lacks_a_habit_is_refused_by_its_name_at_once(tmp_path: Path, habit: Any) -> None:
    async with FakeSglang(OLDER[habit.since]) as server:
        began = time.monotonic()
        with pytest.raises(EngineUnfit) as refused:
            await opened(server, tmp_path)
        assert time.monotonic() - began < 5
        said = str(refused.value)
        assert f"SGLang {server.sglang}, and {text(LEAST)} is the least" in said
        assert f"{habit.what} (since {text(habit.since)}; before, {habit.before})" in said
        assert not {"/generate", "/continue_generation", "/update_weights_from_disk"} & set(server.order)


@pytest.mark.parametrize("said", ["0.5.21", "0.5.22", "0.5.22.post1", "0.5.23", "0.5.24.dev3+g0123abc", "0.6.0rc1"])
async def test_later_builds_of_a_release_count_as_that_release(tmp_path: Path, said: str) -> None:
    async with FakeSglang(said) as server:
        await opened(server, tmp_path)


@pytest.mark.parametrize("said", ["0.5.15.post1", "0.5.20.dev7+gabc", "0.4.9"])
async def test_later_builds_of_an_old_release_are_old(tmp_path: Path, said: str) -> None:
    async with FakeSglang(said) as server:
        with pytest.raises(EngineUnfit, match=re.escape(f"SGLang {said}, and 0.5.21 is")):
            await opened(server, tmp_path)


@pytest.mark.parametrize("said", [None, "", "unknown", "0.0.0.dev1+gabc", "main"])
async def test_version_that_names_no_release_is_refused_until_somebody_names_one(
    tmp_path: Path, said: str | None
) -> None:
    async with FakeSglang() as server:
        server.sglang = said
        with pytest.raises(EngineUnfit, match=r"names no release.*--sglang-version"):
            await opened(server, tmp_path)
        with capture_logs() as logs:
            await opened(server, tmp_path, sglang_version="0.5.23")
        assert [log["notice"] for log in logs if log["event"] == "engine connected"] == [
            f"taken for SGLang 0.5.23 by --sglang-version; it says {said}"
        ]


async def test_what_a_release_lacks_without_being_unfit_is_said_when_it_is_connected(tmp_path: Path) -> None:
    async with FakeSglang("0.5.21") as server:
        with capture_logs() as logs:
            await opened(server, tmp_path)
        (notice,) = [log["notice"] for log in logs if log["event"] == "engine connected"]
        assert notice.startswith(
            "SGLang 0.5.21 lacks: a failed cache flush as an answer (since 0.5.22; before, it ended"
        )
    async with FakeSglang("0.5.23") as server:
        with capture_logs() as logs:
            await opened(server, tmp_path)
        assert not [log for log in logs if log["event"] == "engine connected"]


async def test_server_that_is_exchanged_for_an_older_one_is_told_from_one_that_is_not_ready(tmp_path: Path) -> None:
    async with FakeSglang() as server:
        host = host_at(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        await open_slot("e0", host)
        server.sglang = "0.5.19"
        with pytest.raises(EngineUnfit, match=r"SGLang 0\.5\.19"):
            await host.revive()
        await host.close()


async def test_fork_that_is_taken_for_more_than_it_is_ends_as_upstream_said(tmp_path: Path) -> None:
    """Reason why 0.5.20 is refused: the first update while requests wait ends its scheduler."""
    weights = write_random_model(tmp_path / "model", seed=0)
    async with FakeSglang("0.5.20") as server:
        server.model_path = str(weights)
        engine = SglangEngine(server.url, options=ServerOptions(counts_as="0.5.23", reconnect_s=0.2))
        await engine.pause(PauseMode.RETRACT)
        server.waiting = 1
        with pytest.raises(EngineError):
            await engine.load_files(weights, "1.1")
        assert server.ended
        await engine.close()


# --- launched servers -------------------------------------------------------------------------------------------


def interpreter_with(tmp_path: Path, version: str) -> Path:
    """An interpreter that has an SGLang of this version, and cannot start it."""
    packages = tmp_path / "packages"
    (packages / "sglang-0.dist-info").mkdir(parents=True)
    (packages / "sglang-0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    )
    python = tmp_path / "python"
    run = f"import sys; sys.path.insert(0, {str(packages)!r}); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "{run}" "$@"\n')
    python.chmod(0o755)
    return python


async def test_sglang_that_is_too_old_is_not_started(tmp_path: Path) -> None:
    made = SglangServerOptions(
        python=interpreter_with(tmp_path, "0.5.20"), model_path=tmp_path, log_path=tmp_path / "log"
    )
    with pytest.raises(EngineUnfit, match=r"SGLang 0\.5\.20, and 0\.5\.21 is the least"):
        await SglangLauncher(made).start()
    assert not (tmp_path / "log").exists()


async def test_sglang_that_is_new_enough_is_started(tmp_path: Path) -> None:
    made = SglangServerOptions(
        python=interpreter_with(tmp_path, "0.5.22"), model_path=tmp_path, log_path=tmp_path / "log"
    )
    with pytest.raises(EngineNotStarted, match="ended with exit code"):
        await SglangLauncher(made).start()


# --- sampling that a server cannot do ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "NGRAM", "somebody's own"])
async def test_speculative_decoding_without_masks_is_said_at_connect_and_refused_by_the_options_name(
    algorithm: str,
) -> None:
    async with FakeSglang() as server:
        server.speculative = algorithm
        engine = SglangEngine(server.url, options=QUICK)
        (notice,) = (await engine.info()).notices
        assert f"no top_p, top_k and min_p with --speculative-algorithm {algorithm}" in notice
        server.order.clear()
        for field, value in {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0.0}.items():
            with pytest.raises(InvalidField, match=f"--speculative-algorithm {algorithm}") as refused:
                await engine.generate([request(**{field: value})])
            assert refused.value.attributes["field"] == field
        assert not server.order
        assert len(await engine.generate([request(temperature=0.7, repetition_penalty=1.1)])) == 1
        await engine.close()


async def test_one_family_of_speculative_decoding_has_masks_of_all_but_min_p() -> None:
    async with FakeSglang() as server:
        server.speculative = "DFLASH"
        engine = SglangEngine(server.url, options=QUICK)
        (notice,) = (await engine.info()).notices
        assert "no min_p with --speculative-algorithm DFLASH" in notice
        engine.check_sampling(request(top_p=0.9))
        with pytest.raises(InvalidField, match="min_p"):
            engine.check_sampling(request(min_p=0.1))
        await engine.close()
    async with FakeSglang("0.5.21") as server:
        server.speculative = "DFLASH"
        engine = SglangEngine(server.url, options=QUICK)
        await engine.info()
        with pytest.raises(InvalidField, match="top_p"):
            engine.check_sampling(request(top_p=0.9))
        await engine.close()


def test_releases_are_read_from_what_servers_say() -> None:
    assert release_of("0.5.15.post1") == (0, 5, 15)
    assert release_of("v0.5.23") == (0, 5, 23)
    assert release_of("0.0.0.dev4") is None
    assert release_of(None) is None
