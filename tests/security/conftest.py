"""A service that asks for tokens, shared by a file's tests, and a token of every role."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from buffer_service.security.roles import Role
from tests.security.guarded import Guarded, add_token
from tests.support.service import running_service


@pytest.fixture(autouse=True)
def no_access_around(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("RB_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    tokens_file = folder / "tokens.jsonl"
    add_token(tokens_file, "root", Role.ADMIN, "*")
    with running_service(folder, tokens_file=tokens_file) as service:
        yield Guarded(service, tokens_file)


@pytest.fixture(scope="module")
def tokens(guarded: Guarded) -> dict[Role, str]:
    """A token of each role, for RUNS."""
    return {role: guarded.add(f"of-{role}", role) for role in Role}


@pytest.fixture
def expired(guarded: Guarded) -> Iterator[dict[Role, str]]:
    moment = datetime.now(UTC) - timedelta(seconds=1)
    yield {role: guarded.add(f"old-{role}", role, expires=moment) for role in Role}
    for role in Role:
        guarded.revoke(f"old-{role}")


@pytest.fixture
def channel(guarded: Guarded) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.service.address) as made:
        yield made
