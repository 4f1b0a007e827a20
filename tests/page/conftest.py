"""A service and a real Chromium. Tests with a browser are skipped where no Chromium is on PATH, and only there."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_buffer.v1 import runs_pb2
from tests.page.browser import FLAGS, Chromium, Screen
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc
from tests.support.service import ServiceProcess

BINARIES = ("chromium", "chromium-browser", "google-chrome")
LAUNCH_MS = 90_000
"""A first start reads a few hundred megabytes from the disk."""


@pytest.fixture
def named(rpc: Rpc) -> Callable[..., RunRpc]:
    """Makes a run whose name begins so."""

    def make(name: str, **policy: object) -> RunRpc:
        run_id = f"{name}-{uuid.uuid4().hex[:6]}"
        request = runs_pb2.CreateRunRequest(run_id=run_id, policy=runs_pb2.RunPolicy(**policy))  # type: ignore[arg-type]
        rpc.runs.CreateRun(request, timeout=TIMEOUT_S)
        return RunRpc(rpc, run_id)

    return make


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """One browser for a module, without settings of its own or connections to elsewhere.

    Not for the session: playwright's event loop runs in this thread until it is closed, and asyncio's tests of the
    modules that follow could not start theirs.
    """
    binary = next((found for name in BINARIES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no Chromium on PATH ({', '.join(BINARIES)})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=FLAGS, timeout=LAUNCH_MS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def screen(chromium: Chromium, service: ServiceProcess) -> Iterator[Screen]:
    """A window of 1280 by 800 on the service's page."""
    with Screen.opened(chromium, service.admin) as screen:
        yield screen


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tell where screenshots go."""
    return tmp_path_factory.mktemp("shots")
