"""The script of the bundled store, with real servers: each pod an address of loopback, all with the same ports."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer_service.store.binary import find_binary
from tests.chart.helm import CHART, KIND, VALUE_SETS, missing, pods_of
from tests.support.mortal import mortal
from tests.support.sentinels import free_port

RUN = CHART / "files/store/run.sh"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SERVICE = "buffer"
PASSWORD = "a-Secret_1"
DEADLINE_S = 90.0
POLL_S = 0.1


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valkey-server and valkey-cli, as the image has them."""
    command_line = shutil.which("valkey-cli") or shutil.which("redis-cli")
    if command_line is None:
        missing("there is no valkey-cli or redis-cli on PATH (Debian and Ubuntu: redis-tools)")
    folder = tmp_path_factory.mktemp("bin")
    (folder / "valkey-server").symlink_to(find_binary(os.environ.get("RB_TEST_STORE_BINARY")))
    (folder / "valkey-cli").symlink_to(command_line)
    return folder


class StorePod:
    """A server, and a Sentinel if it is one of several, with a volume that outlives them."""

    def __init__(self, programs: Path, volume: Path, host: str, ports: tuple[int, int], hosts: tuple[str, ...]) -> None:
        self.host = host
        self.port, self.sentinel_port = ports
        self.volume = volume
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (volume / "sentinel").mkdir(parents=True)
        (volume / "run").mkdir()
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "APPENDFSYNC": "no",
            "MAXMEMORY": "64mb",
            "SELF": host,
            "HOSTS": " ".join(hosts),
            "SERVICE": SERVICE,
            # Long enough that a machine that is busy with twelve starts at once takes nobody for dead.
            "DOWN_AFTER_MS": "8000",
            "FAILOVER_TIMEOUT_MS": "8000",
            "STORE_PASSWORD": PASSWORD,
            "CONFIG": str(volume / "run"),
            "PORT": str(self.port),
            "SENTINEL_PORT": str(self.sentinel_port),
            "BIND": host,
            "WAIT_S": "60",
        }

    def start(self, *modes: str) -> None:
        """Start programs of the script."""
        for mode in modes:
            data = self.volume / "sentinel" if mode == "sentinel" else self.volume
            with (self.volume / f"{mode}.log").open("ab") as log:
                self.processes[mode] = subprocess.Popen(
                    mortal(["/bin/sh", str(RUN), mode]),
                    env={**self.environment, "DATA": str(data)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )

    def kill(self) -> None:
        """kill -9 of all, as when the node is lost."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def ask(self, *command: str, sentinel: bool = False, password: str = PASSWORD) -> str:
        """What the server, or the Sentinel, answers; errors are text too."""
        port = self.sentinel_port if sentinel else self.port
        environment = {**self.environment, "REDISCLI_AUTH": password}
        if not password:
            del environment["REDISCLI_AUTH"]
        asked = ["valkey-cli", "-h", self.host, "-p", str(port), "--raw", *command]
        programs = self.environment["PATH"].partition(":")[0]
        asked[0] = f"{programs}/valkey-cli"
        done = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment, timeout=30)
        return (done.stdout + done.stderr).strip()

    def ready(self, probe: list[str], folder: Path) -> bool:
        """Whether a readiness probe of the chart passes, with a valkey-cli that finds this server."""
        folder.mkdir(exist_ok=True)
        client = folder / "valkey-cli"
        programs = self.environment["PATH"].partition(":")[0]
        client.write_text(f'#!/bin/sh\nexec {programs}/valkey-cli -h {self.host} -p {self.port} "$@"\n')
        client.chmod(0o755)
        environment = {**self.environment, "PATH": f"{folder}:/usr/bin:/bin"}
        return subprocess.run(probe, capture_output=True, check=False, env=environment, timeout=30).returncode == 0

    @property
    def role(self) -> str:
        """master or slave; empty while it does not answer."""
        lines = self.ask("INFO", "replication").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("role:")), "")

    def logs(self) -> str:
        """What its programs have said."""
        return "\n".join(f"--- {self.host} {path.name}\n{path.read_text()}" for path in self.volume.glob("*.log"))


def _until(met: Callable[[], bool], what: str, pods: list[StorePod]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline, f"not in time: {what}\n" + "\n".join(pod.logs() for pod in pods)
        time.sleep(POLL_S)


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
    _until(lambda: pod.ask("PING") == "PONG", "it answers", [pod])

    assert "NOAUTH" in pod.ask("PING", password="")
    assert pod.ask("CONFIG", "GET", "maxmemory-policy").splitlines()[1] == "noeviction"
    assert pod.ask("CONFIG", "GET", "maxmemory").splitlines()[1] == str(64 << 20)
    assert pod.ask("CONFIG", "GET", "appendonly").splitlines()[1] == "yes"

    pod.ask("SET", "kept", "1")
    pod.kill()
    pod.start("server")
    _until(lambda: pod.ask("PING") == "PONG", "it answers again", [pod])
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
    _until(lambda: primary.ready(probe, tmp_path / "bin"), "the primary is ready", [primary])
    _until(lambda: replica.ready(probe, tmp_path / "bin"), "a server alone is ready", [replica])

    replica.ask("REPLICAOF", primary.host, str(primary.port))
    _until(lambda: replica.ready(probe, tmp_path / "bin"), "the replica follows", [primary, replica])
    primary.kill()
    _until(lambda: "master_link_status:down" in replica.ask("INFO", "replication"), "the link is lost", [replica])

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
    _until(lambda: pod.ready(_probe(KIND), tmp_path / "bin"), "it is ready", [pod])


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
    _until(in_step, "the first is primary of two replicas, known to three Sentinels", pods)
    assert primaries() == [pods[0]], "Sentinels that have never run begin with the first"
    assert pods[0].ask("CONFIG", "GET", "repl-backlog-size").splitlines()[1] == str(64 << 20)
    limits = pods[0].ask("CONFIG", "GET", "client-output-buffer-limit").splitlines()[1]
    assert f"{4 << 30} {2 << 30} 300" in limits
    assert "NOAUTH" in pods[1].ask("PING", sentinel=True, password="")

    pods[0].kill()
    _until(lambda: len(primaries()) == 1, "another one is promoted", pods)
    (promoted,) = primaries()
    assert promoted.ask("SET", "after", "1") == "OK"
    _until(lambda: all(pod.ask("GET", "after") == "1" for pod in pods[1:]), "the other replica has it", pods)

    for pod in pods[1:]:
        pod.kill()
    for pod in pods:
        pod.start("sentinel", "replicated")
    _until(in_step, "all are back", pods)

    assert primaries() == [promoted]
    _until(lambda: all(pod.ask("GET", "after") == "1" for pod in pods), "the first has followed", pods)


def test_a_server_does_not_guess_who_is_primary(pods: list[StorePod]) -> None:
    pod = pods[1]
    pod.environment["WAIT_S"] = "0"
    pod.start("replicated")

    assert pod.processes["replicated"].wait(timeout=60) == 1
    assert "waited 0 s for 2 Sentinels" in pod.logs()
    assert "0 answered" in pod.logs()
