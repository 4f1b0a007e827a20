"""Scene of a case of `make bench-fleet`: replicas on one store, a run, and processes that load them."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.fleet.load import Opened, load
from bench.measure import cpu_s, resident_bytes
from bench.ours import Service, service
from bench.roles import Role
from buffer_service.security.roles import Role as TokenRole
from buffer_service.security.token_file import changing
from buffer_service.security.tokens import TokenEntry, TokenSet, digest, new_token
from rollout_buffer.v1 import (
    common_pb2,
    runs_pb2,
    runs_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

RUN = common_pb2.RunRef(run_id="fleet")
LOADERS = 2


@dataclass(frozen=True)
class Replica:
    """A replica: its address, and its rpc process."""

    address: str
    pid: int
    store_pid: int
    unix_socket: str

    @classmethod
    def of(cls, own: Service) -> "Replica":
        """The replica of a service with one rpc process."""
        return cls(own.address, _pid(own, b"buffer_service.app"), _pid(own, b"-server"), own.unix_socket)


def _pid(own: Service, part: bytes) -> int:
    """Pid of the process whose command line has this; 0 for none."""
    for pid in own.pids:
        if part in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return 0


class Scene:
    """A run on one replica or several, and the processes that load them."""

    def __init__(self, replicas: Sequence[Replica], loaders: Sequence[Role], token: str = "") -> None:
        self.replicas = replicas
        self.loaders = loaders
        self._token = token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = grpc.insecure_channel(replicas[0].address)
        self._version = 0

    def call(self, stub: Callable[..., Any], method: str, request: object) -> Any:  # noqa: ANN401 - of any method
        """One call, by gRPC's own client."""
        return getattr(stub(self._channel), method)(request, timeout=30.0, metadata=self._metadata)

    def cpu(self) -> float:
        """Seconds of the rpc processes so far."""
        return cpu_s([replica.pid for replica in self.replicas])

    def load_cpu(self) -> float:
        """Seconds of the load's processes so far."""
        return float(sum(loader.call("cpu") for loader in self.loaders))

    def resident(self) -> int:
        """Bytes of the rpc processes."""
        return sum(resident_bytes(replica.pid) for replica in self.replicas)

    def open(
        self, connections: int, streams: int, method: str, messages: Sequence[bytes], *, more: bool = False
    ) -> Opened:
        """Streams on connections that are spread over loaders and replicas, all at once."""
        for number, loader in enumerate(self.loaders):
            mine = range(number, connections, len(self.loaders))
            # Not by `number`: with as many replicas as loaders each would load one alone.
            addresses = [self.replicas[i // len(self.loaders) % len(self.replicas)].address for i in mine]
            own = messages[number :: len(self.loaders)] if len(messages) > 1 else messages
            loader.start("open", addresses, streams, method, own, self._token, more)
        each: list[Opened] = [loader.wait() for loader in self.loaders]
        return Opened(sum(e.opened for e in each), sum(e.refused for e in each), max(e.seconds for e in each))

    def publish(self) -> float:
        """Publish the next version; the monotonic time before the call."""
        self._version += 1
        files = [
            weights_pb2.WeightFile(name=f"model-{i}.safetensors", size_bytes=1, sha256=bytes(32)) for i in range(8)
        ]
        manifest = weights_pb2.WeightManifest(
            files=weights_pb2.FilesManifest(base_url="http://trainer:1/v", files=files)
        )
        started = time.monotonic()
        self.call(
            weights_pb2_grpc.WeightServiceStub,
            "Publish",
            weights_pb2.PublishRequest(run=RUN, term=1, version=self._version, manifest=manifest),
        )
        return started

    def told(self, number: int) -> list[float]:
        """Times at which the streams had message `number`."""
        for loader in self.loaders:
            loader.start("told", number)
        return sorted(at for loader in self.loaders for at in loader.wait())


@contextmanager
def scene(replicas: int = 1, *, guarded: bool = False) -> Iterator[Scene]:
    """Replicas on one store, a run, and loaders."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_fleet_")))
        flags, token = ["--rpc-processes", "1"], ""
        if guarded:
            token = new_token("fleet")
            with changing(directory / "tokens") as held:
                held[0] = TokenSet([TokenEntry("fleet", TokenRole.ADMIN, ("*",), digest(token), None)])
            flags += ["--tokens-file", str(directory / "tokens")]
        (directory / "0").mkdir()
        started = [Replica.of(stack.enter_context(service(directory / "0", "process", *flags)))]
        for number in range(1, replicas):
            (directory / str(number)).mkdir()
            more = (*flags, "--store", f"unix://{started[0].unix_socket}")
            started.append(Replica.of(stack.enter_context(service(directory / str(number), "memory", *more))))
        loaders = [stack.enter_context(Role(load)) for _ in range(LOADERS)]
        made = Scene(started, loaders, token)
        policy = runs_pb2.RunPolicy(batch_groups=1, max_queued_groups=100_000, lease_ttl_ms=600_000)
        made.call(runs_pb2_grpc.RunServiceStub, "CreateRun", runs_pb2.CreateRunRequest(run_id="fleet", policy=policy))
        yield made
