"""A real service as a child process, on free ports, with a data directory of its own.

    with running_service(tmp_path) as service:
        channel = grpc.insecure_channel(service.address)

The context waits until RPCs are served and ends the service with SIGTERM; its log is printed when it fails to start
and lies in `service.log`. `kill`, `stop` and `start` are for tests of restarts: the address stays the same.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
METRIC_TIMEOUT_S = 10.0
POLL_S = 0.02
RELEASED = Path(__file__).parents[2] / ".cache/released"
"""Content of the last release's wheel, where scripts/released.sh has built it."""
CHECKOUT = [str(Path(__file__).parents[2] / folder) for folder in (".", "proto")]


def release_is_there() -> bool:
    """True where there is the last release's wheel."""
    return (RELEASED / "commit").exists()


class ServiceFailed(AssertionError):
    """The service ended, or did not serve in time; the message holds its log."""


class ServiceProcess:
    """One service. `settings` are flags of `rollout-buffer serve` without dashes: {"rpc_processes": 1}.

    `code`: a folder whose packages are run in place of the checkout's of the same names: another version. `within`: a
    command that the service's is the end of.
    """

    def __init__(
        self,
        data_dir: Path,
        settings: Mapping[str, object] | None = None,
        *,
        code: Path | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.data_dir = data_dir
        self.code = code
        self.within = within
        self.settings = dict(settings or {})
        self.listen = "127.0.0.1:0"
        self.admin_listen = "127.0.0.1:0"
        self.process: subprocess.Popen[bytes] | None = None
        self._state: dict[str, str] = {}

    @property
    def log(self) -> Path:
        """Standard output and error of every start."""
        return self.data_dir.parent / f"{self.data_dir.name}.service.log"

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return self._state["address"]

    @property
    def admin(self) -> str:
        """Base URL of the admin page."""
        return f"http://{self._state['admin']}"

    @property
    def pid(self) -> int:
        """Pid of the supervisor."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start, or start again at the same addresses, and wait until RPCs are served."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        before = self._written()
        command, environment = self._command()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # `python -m` looks into the working directory first.
                cwd=self.code,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while (written := self._written()) is None or written == before:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServiceFailed(f"the service does not serve; its log:\n{self.log.read_text()}")
            time.sleep(POLL_S)
        self._state = written
        self.listen, self.admin_listen = self._state["address"], self._state["admin"]

    def stop(self) -> int:
        """SIGTERM, and wait; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self._terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceFailed(f"the service does not stop; its log:\n{self.log.read_text()}") from None

    def kill(self) -> None:
        """kill -9 of the supervisor: its children die with it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def metric(self, name: str, **labels: str) -> float:
        """A value of /metrics, 0 where there is none yet; sums what the labels leave open."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=METRIC_TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def until_metric(self, value: float, name: str, **labels: str) -> None:
        """Wait until the metric has this value; it is how tests see from outside that an RPC waits."""
        deadline = time.monotonic() + METRIC_TIMEOUT_S
        while (seen := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name}{labels} is {seen}, not {value}"
            time.sleep(POLL_S)

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """The command that starts it, and the environment."""
        return [*self.within, sys.executable, "-m", "buffer_cli", "serve", *self._flags()], self._environment()

    def _terminate(self) -> None:
        """Send SIGTERM to a process that runs."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def _flags(self) -> list[str]:
        flags = {"listen": self.listen, "admin": self.admin_listen, "data_dir": self.data_dir, **self.settings}
        given = []
        for name, value in flags.items():
            option = f"--{name.replace('_', '-')}"
            given += [option] if value is True else [f"--no-{option[2:]}"] if value is False else [option, str(value)]
        return given

    def _environment(self) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RB_")}
        if self.code is not None:
            given = environment.get("PYTHONPATH", "").split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.code), *given, *CHECKOUT]))
        return environment

    def _written(self) -> dict[str, str] | None:
        try:
            state: dict[str, str] = json.loads((self.data_dir / "service.json").read_text())
        except FileNotFoundError:
            return None
        return state


@contextlib.contextmanager
def running_service(folder: Path, **settings: object) -> Iterator[ServiceProcess]:
    """A service with its data in `folder`/data; one rpc process unless `settings` say otherwise.

    Under `make test-images` it is the one of the image, with a store beside it.
    """
    settings = {"rpc_processes": 1, "drain_grace_s": 5, **settings}
    if "RB_TEST_IMAGES" in os.environ:
        from tests.support.container import running_container

        with running_container(folder, **settings) as container:
            yield container
        return
    service = ServiceProcess(folder / "data", settings)
    service.start()
    try:
        yield service
    finally:
        service.stop()
