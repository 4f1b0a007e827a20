"""A sample of the pairings against the real service, with real workers and a real trainer. Seeded; troubles are real,
so what they hit is not.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_service.rpc.convert.policies import to_policy
from rollout_buffer.v1 import runs_pb2
from tests.liveness.pairing import PLAIN, Pairing
from tests.liveness.real_parties import live
from tests.support.rpc import TIMEOUT_S, connect
from tests.support.service import ServiceProcess, running_service

STEPS = 6
AT_ONCE = 4
DIRECT_FROM_BYTES = 600
"""Size from which on groups go directly: part of those that the workers make."""


def pairing(admission: str, overflow: str, gate: str, filter_: str, **others: str) -> Pairing:
    return Pairing.plain(admission, overflow, gate, filter_).with_others(PLAIN | others)


PAIRINGS = [
    pairing("lookahead 0", "block", "cancel", "equal rewards"),
    pairing("in flight 1", "reject", "recycle", "lengths", queue="a little larger"),
    pairing("in flight 1, reserve", "block", "least", "rewards", shape="micro-batches of 1"),
    pairing("reserve", "drop_oldest", "mean", "equal rewards", shape="equal, 4 ranks"),
    pairing("lookahead 1", "block", "recycle twice", "equal rewards", pace="3 per publish", quota="groups"),
    pairing("lookahead 4", "reject", "cancel", "no filter", pace="2 ahead", shape="micro-batches of 2"),
    pairing("in flight N", "block", "tail", "lengths", shape="tokens, equal", queue="few tokens"),
    pairing("no admission", "reject", "least", "rewards", quota="tokens", trainer="crashes"),
    pairing("no admission", "block", "least + 1", "equal rewards", pace="1 ahead, 2 per publish", mixture="shares"),
    pairing("reserve, lookahead 4", "block", "recycle", "no filter", shape="own sizes", attempts="no spread"),
    pairing(
        "in flight N, lookahead 1", "drop_oldest", "cancel", "rewards", shape="equal micro-batches", trainer="crashes"
    ),
    pairing("lookahead 0", "reject", "least", "lengths", mixture="priority", attempts="1 attempt"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service"), direct_from_bytes=DIRECT_FROM_BYTES) as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, len(PAIRINGS), AT_ONCE))
async def test_the_trainer_gets_its_batches(service: ServiceProcess, tmp_path: Path, first: int) -> None:
    rpc = connect(service.address)
    async with asyncio.TaskGroup() as group:
        for i, chosen in enumerate(PAIRINGS[first : first + AT_ONCE], first):
            group.create_task(one_run(service, f"liveness-{i}", tmp_path / str(i), chosen, seed=i))
    for i in range(first, min(first + AT_ONCE, len(PAIRINGS))):
        reply = rpc.runs.GetRun(runs_pb2.GetRunRequest(run={"run_id": f"liveness-{i}"}), timeout=TIMEOUT_S)  # type: ignore[arg-type]
        assert reply.run.groups.balanced
        assert reply.run.tasks.balanced
    rpc.channel.close()
    for method in ("PushGroups", "PullBatch"):
        assert service.metric("rollout_buffer_direct_bytes_total", method=method) > 0


async def one_run(service: ServiceProcess, run_id: str, directory: Path, chosen: Pairing, *, seed: int) -> None:
    rpc = connect(service.address)
    request = runs_pb2.CreateRunRequest(run_id=run_id, policy=to_policy(chosen.policy()))
    rpc.runs.CreateRun(request, timeout=TIMEOUT_S)
    rpc.channel.close()
    try:
        groups = await live(
            service.address, run_id, directory, chosen.habits, chosen.environments, steps=STEPS, seed=seed
        )
    except Exception as error:
        error.add_note(f"{run_id}: {chosen}")
        raise
    assert groups >= STEPS
