"""A pod of the bundled store: the chart's script with real servers, at an address of loopback."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chart.helm import CHART
from tests.support.mortal import mortal

RUN = CHART / "files/store/run.sh"
SERVICE = "buffer"
PASSWORD = "a-Secret_1"
DEADLINE_S = 90.0
POLL_S = 0.1


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
                    start_new_session=True,
                )

    def kill(self) -> None:
        """kill -9 of all, with what they have started, as when the node is lost."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def ask(self, *command: str, sentinel: bool = False, password: str | None = None) -> str:
        """Return what the server, or the Sentinel, answers; errors are text too."""
        port = self.sentinel_port if sentinel else self.port
        password = self.environment.get("STORE_PASSWORD", "") if password is None else password
        environment = {**self.environment, "REDISCLI_AUTH": password}
        if not password:
            del environment["REDISCLI_AUTH"]
        asked = ["valkey-cli", "-h", self.host, "-p", str(port), "--raw", *command]
        programs = self.environment["PATH"].partition(":")[0]
        asked[0] = f"{programs}/valkey-cli"
        done = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment, timeout=30)
        return (done.stdout + done.stderr).strip()

    def ready(self, probe: list[str], folder: Path) -> bool:
        """Tell whether a readiness probe of the chart passes, with a valkey-cli that finds this server."""
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
        """Return what its programs have said."""
        return "\n".join(f"--- {self.host} {path.name}\n{path.read_text()}" for path in self.volume.glob("*.log"))


def until(met: Callable[[], bool], what: str, pods: Sequence[StorePod]) -> None:
    """Wait until it is met; fails with `what`, and what all have said, after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline, f"not in time: {what}\n" + "\n".join(pod.logs() for pod in pods)
        time.sleep(POLL_S)
