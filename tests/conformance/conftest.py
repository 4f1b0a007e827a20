"""A service for all tests of the kit, and the records of our own worker and trainer, made once."""

import asyncio
import copy
import sys
from collections.abc import Iterator

import pytest

from buffer_conformance.record import Record
from buffer_conformance.stage import SuiteOptions
from buffer_conformance.suites import SUITES
from tests.support.service import running_service

OUR_WORKER = (
    sys.executable, "-m", "buffer_cli", "worker", "--address", "{address}", "--run", "{run}", "--simulate",
    "--tokens-per-s", "100", "--reward", "tests.workers.building:length_reward",
)  # fmt: skip
OUR_TRAINER = (sys.executable, "-m", "tests.conformance.our_trainer", "{address}", "{run}")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_service(tmp_path_factory.mktemp("conformance-service")) as running:
        yield running.address


def recorded(kind: str, options: SuiteOptions) -> Record:
    return asyncio.run(SUITES[kind].run(options))


@pytest.fixture(scope="session")
def of_our_worker(service: str, tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("our-worker")
    command = [*OUR_WORKER, "--weights-dir", str(folder / "weights")]
    return recorded("worker", SuiteOptions(command=command, folder=folder, service=service))


@pytest.fixture(scope="session")
def of_our_trainer(service: str, tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("our-trainer")
    return recorded("trainer", SuiteOptions(command=OUR_TRAINER, folder=folder, service=service))


@pytest.fixture
def worker_record(of_our_worker: Record) -> Record:
    """A copy, to be falsified."""
    return copy.deepcopy(of_our_worker)


@pytest.fixture
def trainer_record(of_our_trainer: Record) -> Record:
    """A copy, to be falsified."""
    return copy.deepcopy(of_our_trainer)
