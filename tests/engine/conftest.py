"""One real SGLang server for the module that asks for it, and a fake one for each test."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher
from tests.engine.fake_sglang import FakeSglang
from tests.support.sglang_python import real_sglang
from tests.support.tiny_model import TinyModelShape, write_constant_model, write_random_model

SHAPE = TinyModelShape()
CONSTANT_TOKENS = (100, 101, 102)


@dataclass(frozen=True)
class Models:
    """Model directories; `constant[i]` always emits CONSTANT_TOKENS[i]."""

    random: tuple[Path, Path]
    constant: tuple[Path, ...]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    at = tmp_path_factory.mktemp("models")
    return Models(
        random=(
            write_random_model(at / "random-0", seed=0, shape=SHAPE),
            write_random_model(at / "random-1", seed=1, shape=SHAPE),
        ),
        constant=tuple(write_constant_model(at / f"constant-{t}", t, shape=SHAPE) for t in CONSTANT_TOKENS),
    )


# By module, so that it is gone before another folder's tests start theirs: a server takes 2 GB.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher(models: Models, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SglangLauncher]:
    async with real_sglang(models.random[0], tmp_path_factory.mktemp("sglang")) as launcher:
        yield launcher


@pytest_asyncio.fixture
async def engine(launcher: SglangLauncher) -> AsyncIterator[SglangEngine]:
    """An engine on the real server, left unpaused."""
    engine = SglangEngine(launcher.base_url, options=ServerOptions(generate_timeout_s=100))
    yield engine
    await engine.resume()
    await engine.close()


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeSglang]:
    async with FakeSglang() as server:
        yield server
