"""Weight updates of worker processes with simulated engines, through the real service."""

import re
from functools import partial
from pathlib import Path

from tests.support.service import ServiceProcess
from tests.workers.process import worker_process
from tests.workers.training import OPTIONS, endless, until, write_weights
from trainer_client import BufferClient, Policy
from trainer_client.publish import FilesPublisher

ENGINES = ("--simulate", "--tokens-per-s", "400", "--groups-per-engine", "2", "--lease-wait-s", "1")


def loaded(client: BufferClient, run_id: str, version: int, engines: int) -> bool:
    found = client.run(run_id).engines
    return len(found) == engines and all(engine.loaded.version == version for engine in found)


def test_engines_of_several_workers_load_in_turn_and_all_arrive(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    policy = Policy(batch_groups=4, max_staleness=8, overflow_action="block", max_unavailable_engines=1)
    with (
        FilesPublisher(tmp_path / "published", serve="http") as publisher,
        client.session("rolling", policy=policy, tasks=endless(), publisher=publisher, options=OPTIONS) as session,
        worker_process(service.address, "rolling", tmp_path / "a", *ENGINES, "--engines", "3", worker_id="a") as a,
        worker_process(service.address, "rolling", tmp_path / "b", *ENGINES, "--engines", "3", worker_id="b") as b,
    ):
        until(lambda: loaded(client, "rolling", 0, 6), "six engines have begun")
        for version in (1, 2, 3):
            session.publish(write_weights(b"%d" % version))
            until(partial(loaded, client, "rolling", version, 6), f"all have loaded version {version}")
        state = client.run("rolling")
        assert {engine.errors for engine in state.engines} == {0}
        assert {engine.reloads for engine in state.engines} == {3}
        assert a.stop() == b.stop() == 0


def test_worker_that_starts_after_the_trainer_has_gone_gets_the_weights_from_another(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    with (
        FilesPublisher(tmp_path / "trainer" / "published", serve="http") as publisher,
        client.session(
            "peers", policy=Policy(batch_groups=4), tasks=endless(), publisher=publisher, options=OPTIONS
        ) as session,
        worker_process(
            service.address, "peers", tmp_path / "a", *ENGINES, "--weights-serve", "127.0.0.1:0", worker_id="a"
        ) as first,
    ):
        session.publish(write_weights(b"weights of version 1" * 100_000))
        until(lambda: loaded(client, "peers", 1, 1), "the first worker has loaded version 1")
        url = re.search(r"serving weights\s.*?url=(\S+)", first.said())
        assert url is not None
        assert [engine.weights_url for engine in client.run("peers").engines] == [url[1]]
        publisher.close()
        (tmp_path / "trainer").rename(tmp_path / "not here any more")
        with worker_process(service.address, "peers", tmp_path / "b", *ENGINES, worker_id="b") as second:
            until(lambda: loaded(client, "peers", 1, 2), "the second worker has loaded version 1")
            assert "download resumes" in second.said()
    (place,) = (tmp_path / "b" / "weights" / "peers").glob("[0-9]*")
    assert (place / "model.safetensors").read_bytes() == b"weights of version 1" * 100_000
