"""The script of the bundled store, with real servers: each pod an address of loopback, all with the same ports."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.helm import KIND, VALUE_SETS, pods_of
from tests.chart.store_pod import PASSWORD, RUN, SERVICE, StorePod, until
from tests.support.sentinels import free_port

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
NEW_PASSWORD = "a-Secret_2"


@pytest.fixture
def pods(programs: Path, tmp_path: Path) -> Iterator[list[StorePod]]:
    ports = (free_port(), free_port())
    made = [StorePod(programs, tmp_path / host, host, ports, HOSTS) for host in HOSTS]
    yield made
    for pod in made:
        pod.kill()


def test_a_single_server_evicts_nothing_asks_for_the_password_and_keeps_its_data(pods: list[StorePod]) -> None:
    pod = pods[0]
    pod.start("server")
    until(lambda: pod.ask("PING") == "PONG", "it answers", [pod])

    assert "NOAUTH" in pod.ask("PING", password="")
    assert pod.ask("CONFIG", "GET", "maxmemory-policy").splitlines()[1] == "noeviction"
    assert pod.ask("CONFIG", "GET", "maxmemory").splitlines()[1] == str(64 << 20)
    assert pod.ask("CONFIG", "GET", "appendonly").splitlines()[1] == "yes"

    pod.ask("SET", "kept", "1")
    pod.kill()
    pod.start("server")
    until(lambda: pod.ask("PING") == "PONG", "it answers again", [pod])
    assert pod.ask("GET", "kept") == "1"


def _probe(values: Path) -> list[str]:
    (pod,) = pods_of(values, "store")
    command: list[str] = pod.container("server")["readinessProbe"]["exec"]["command"]
    return command


def test_a_replica_is_ready_when_it_follows_its_primary(pods: list[StorePod], tmp_path: Path) -> None:
    (with_password,) = (path for path in VALUE_SETS if path.name == "store-sentinel-values.yaml")
    probe = _probe(with_password)
    primary, replica = pods[:2]
    for pod in (primary, replica):
        pod.start("server")
    until(lambda: primary.ready(probe, tmp_path / "bin"), "the primary is ready", [primary])
    until(lambda: replica.ready(probe, tmp_path / "bin"), "a server alone is ready", [replica])

    replica.ask("REPLICAOF", primary.host, str(primary.port))
    until(lambda: replica.ready(probe, tmp_path / "bin"), "the replica follows", [primary, replica])
    primary.kill()
    until(lambda: "master_link_status:down" in replica.ask("INFO", "replication"), "the link is lost", [replica])

    assert replica.ask("PING") == "PONG"
    assert not replica.ready(probe, tmp_path / "bin")
    replica.environment["STORE_PASSWORD"] = "another"
    replica.ask("REPLICAOF", "NO", "ONE")
    assert not replica.ready(probe, tmp_path / "bin"), "the password is asked for"


def test_a_server_without_password_is_ready(pods: list[StorePod], tmp_path: Path) -> None:
    pod = pods[0]
    del pod.environment["STORE_PASSWORD"]
    assert not pod.ready(_probe(KIND), tmp_path / "bin")
    pod.start("server")
    until(lambda: pod.ready(_probe(KIND), tmp_path / "bin"), "it is ready", [pod])


@pytest.mark.timeout(400)
def test_the_newest_primary_remains_it_when_everything_is_lost_and_started_again(pods: list[StorePod]) -> None:
    def primaries() -> list[StorePod]:
        return [pod for pod in pods if pod.role == "master"]

    def in_step() -> bool:
        leaders = primaries()
        return (
            len(leaders) == 1
            and leaders[0].ask("INFO", "replication").count("state=online") == 2
            and all("OK 3 usable" in pod.ask("SENTINEL", "CKQUORUM", SERVICE, sentinel=True) for pod in pods)
            # They hear of replicas from the primary, every ten seconds; they can promote those alone that they know.
            and all(
                pod.ask("SENTINEL", "REPLICAS", SERVICE, sentinel=True).count("master-link-status\nok") == 2
                for pod in pods
            )
        )

    for pod in pods:
        pod.start("sentinel", "replicated")
    until(in_step, "the first is primary of two replicas, known to three Sentinels", pods)
    assert primaries() == [pods[0]], "Sentinels that have never run begin with the first"
    assert pods[0].ask("CONFIG", "GET", "repl-backlog-size").splitlines()[1] == str(64 << 20)
    limits = pods[0].ask("CONFIG", "GET", "client-output-buffer-limit").splitlines()[1]
    assert f"{4 << 30} {2 << 30} 300" in limits
    assert "NOAUTH" in pods[1].ask("PING", sentinel=True, password="")

    pods[0].kill()
    until(lambda: len(primaries()) == 1, "another one is promoted", pods)
    (promoted,) = primaries()
    assert promoted.ask("SET", "after", "1") == "OK"
    until(lambda: all(pod.ask("GET", "after") == "1" for pod in pods[1:]), "the other replica has it", pods)

    for pod in pods[1:]:
        pod.kill()
    for pod in pods:
        # As when the password is changed and all pods are deleted.
        pod.environment["STORE_PASSWORD"] = NEW_PASSWORD
        pod.start("sentinel", "replicated")
    until(in_step, "all are back", pods)

    assert primaries() == [promoted]
    for sentinel in (True, False):
        assert "WRONGPASS" in pods[0].ask("PING", sentinel=sentinel, password=PASSWORD)
    until(lambda: all(pod.ask("GET", "after") == "1" for pod in pods), "the first has followed", pods)


LEARNT = """\
port 26379
bind * -::*
dir "/data/sentinel"
protected-mode no
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip "s-1"
sentinel monitor buffer s-1 6379 3

sentinel down-after-milliseconds buffer 5000
sentinel failover-timeout buffer 30000
requirepass "a-Secret_1"
sentinel sentinel-pass "a-Secret_1"
sentinel auth-pass buffer "a-Secret_1"

# Generated by CONFIG REWRITE
latency-tracking-info-percentiles 50 99 99.9
user default on #7c690f7a89d92f7cc16977b848182b986d4539b11807ba16920f50f38df709cc ~* &* +@all
sentinel myid ed271d2a009a7308a3dd2388968634e2c5ffecfd
sentinel config-term buffer 4
sentinel leader-term buffer 4
sentinel current-term 4

sentinel known-replica buffer s-0 6379

sentinel known-sentinel buffer s-4 26379 "a991ee081f32d6d387f79523d91c471c2fc9e02d"

sentinel known-sentinel buffer s-0 26379 "f9590166b54ec440c00f2434586e4eb1afbfb61d"

sentinel known-replica buffer s-4 6379
"""
"""File as the second Sentinel of five has rewritten it; two of the others have been left out."""


def _rewritten(folder: Path, **environment: str) -> tuple[list[str], str]:
    """The lines of a Sentinel's file when it starts, and what the script says."""
    server = folder / "bin/valkey-server"
    server.parent.mkdir()
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    (folder / "sentinel.conf").write_text(LEARNT)
    given = {
        "SELF": "s-1",
        "SERVICE": SERVICE,
        "DOWN_AFTER_MS": "8000",
        "FAILOVER_TIMEOUT_MS": "9000",
        "DATA": str(folder),
    }
    path = {"PATH": f"{server.parent}:/usr/bin:/bin"}
    command = ["/bin/sh", str(RUN), "sentinel"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=given | path | environment, timeout=30
    )
    return (folder / "sentinel.conf").read_text().splitlines(), done.stderr


def test_sentinels_of_a_store_that_was_made_smaller_forget_the_others(tmp_path: Path) -> None:
    lines, said = _rewritten(tmp_path, HOSTS="s-0 s-1 s-2", STORE_PASSWORD=PASSWORD)

    assert "sentinel monitor buffer s-1 6379 2" in lines
    assert [line.split()[3] for line in lines if " known-" in line] == ["s-0", "s-0"]
    assert "sentinel down-after-milliseconds buffer 8000" in lines
    assert {"sentinel myid ed271d2a009a7308a3dd2388968634e2c5ffecfd", "sentinel config-term buffer 4"} <= set(lines)
    assert said == ""


def test_sentinels_ask_more_of_a_store_that_was_made_larger(tmp_path: Path) -> None:
    lines, _ = _rewritten(tmp_path, HOSTS="s-0 s-1 s-2 s-3 s-4 s-5 s-6")

    assert "sentinel monitor buffer s-1 6379 4" in lines
    assert sum(" known-" in line for line in lines) == 4


def test_a_sentinel_says_that_its_primary_is_gone(tmp_path: Path) -> None:
    lines, said = _rewritten(tmp_path, HOSTS="s-0 s-2 s-3")

    assert "sentinel monitor buffer s-1 6379 2" in lines, "it knows the newest data, and is not replaced by a guess"
    assert "the primary is s-1, which is none of: s-0 s-2 s-3" in said


@pytest.mark.parametrize("password", ["", NEW_PASSWORD])
def test_nothing_of_a_former_password_remains(tmp_path: Path, password: str) -> None:
    lines, _ = _rewritten(tmp_path, HOSTS="s-0 s-1 s-2", STORE_PASSWORD=password)

    told = [line for line in lines if line.startswith(("requirepass", "user", "sentinel auth", "sentinel sentinel"))]
    assert [line.split()[-1] for line in told] == ([password] * 3 if password else [])


def test_a_server_does_not_guess_who_is_primary(pods: list[StorePod]) -> None:
    pod = pods[1]
    pod.environment["WAIT_S"] = "0"
    pod.start("replicated")

    assert pod.processes["replicated"].wait(timeout=60) == 1
    assert "waited 0 s for 2 Sentinels" in pod.logs()
    assert "0 answered" in pod.logs()
