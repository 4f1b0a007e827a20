"""Scenarios of the ranks of a gloo group, for the tests of sharded weights. Every function runs on all
ranks at once.
"""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from buffer_wire.errors import NotReady, VersionConflict
from tests.trainer_client.fleet import fleet_of
from trainer_client import BufferClient, Policy, Publication, Resumed
from trainer_client.manifest import FilesManifest
from trainer_client.publish import CollectivePublisher, FilesPublisher, ShardedWeights, TensorsPublisher
from trainer_client.publish.named_tensors import specs_of
from trainer_client.publish.saving import save_tensors
from trainer_client.publish.sharded import is_sharded, published_by

BIG_TENSORS = 10
BIG_SHAPE = (5_000, 1_000)
"""20 MB in float32."""


class Tied(torch.nn.Module):
    """Sizes that no number of ranks divides, two dtypes, a buffer, and an output layer that is the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 7)
        self.inner = torch.nn.ModuleList(torch.nn.Linear(7, 7, dtype=torch.bfloat16) for _ in range(2))
        self.out = torch.nn.Linear(7, 13, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))


def model() -> Tied:
    """Make the same model on every rank and in the test."""
    torch.manual_seed(5)
    return Tied()


def sharded_model() -> Tied:
    """The same, spread over all ranks by FSDP2."""
    from torch.distributed.fsdp import fully_shard  # seconds, which not every group of ranks needs

    made = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in made.inner:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def sharded_tensors() -> dict[str, torch.Tensor]:
    """A few small ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {f"t{i}": distribute_tensor(torch.full((5, 3), float(i)), mesh, [Shard(0)]) for i in range(4)}


def warms_up(rank: int) -> None:
    """Warm up: what is imported and connected at first use takes seconds, which are none of the publish's."""
    with ShardedWeights(sharded_tensors()).gathering(leads=rank == 0) as weights:
        if rank == 0:
            for _ in weights():
                pass


def publication(version: int = 1) -> Publication:
    return Publication(cast("BufferClient", None), "r", 1, version)


def _listing(manifest: FilesManifest) -> dict[str, Any]:
    return {"directory": manifest.base_url, "files": [file.name for file in manifest.files]}


def publishes_files(rank: int, *, directory: str) -> dict[str, Any] | None:
    with published_by(sharded_model(), leads=rank == 0) as weights:
        if rank == 0:
            return _listing(FilesPublisher(directory).offer(weights, publication()))
    return None


def publishes_files_of_ddp(rank: int, *, directory: str) -> dict[str, Any] | None:
    """Every rank has all of it; it is the names that are to be those of the module inside."""
    weights = ShardedWeights(torch.nn.parallel.DistributedDataParallel(model()))
    with published_by(weights, leads=rank == 0):
        if rank == 0:
            return _listing(FilesPublisher(directory).offer(weights, publication()))
    return None


def publishes_by_value(rank: int, *, directory: str) -> dict[str, Any] | None:
    weights = ShardedWeights(sharded_model())
    with weights.gathering(leads=rank == 0):
        if rank == 0:
            return _listing(TensorsPublisher(FilesPublisher(directory)).offer(weights, publication()).files)
    return None


def publishes_to_an_engine(rank: int) -> list[dict[str, float]] | None:
    """Sums of what the engine received in two updates, the second after the model has changed."""
    made = sharded_model()
    weights = ShardedWeights(made, dtype=torch.float32)
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(fleet_of("e0")) if rank == 0 else None
        publisher = stack.enter_context(CollectivePublisher(timeout_s=30)) if rank == 0 else None
        for _ in range(2):
            with weights.gathering(leads=rank == 0):
                if fleet is not None and publisher is not None:
                    publisher.offer(weights, fleet.publication())
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.add_(1)
        return fleet.engines[0].received if fleet is not None else None


def casts(rank: int, *, directory: str, leader: int) -> list[str]:
    """Writes what another rank than 0 leads, cast to bfloat16; gives the dtypes as announced."""
    weights = ShardedWeights(sharded_model(), dtype=torch.bfloat16)
    with weights.gathering(leads=rank == leader):
        if rank != leader:
            return []
        specs, on_gpu = specs_of(weights)
        assert not on_gpu
        save_tensors(weights, Path(directory), max_file_bytes=300)
        return [spec.dtype for spec in specs]


def other_layouts(rank: int) -> list[bool]:
    """A state dict of DTensors in other placements, and a tensor that is whole: whether each came out right."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    wholes = {f"t{i}": torch.randn(5, 3) for i in range(3)}
    parts: dict[str, torch.Tensor] = {
        "t0": distribute_tensor(wholes["t0"], mesh, [Shard(1)]),
        "t1": distribute_tensor(wholes["t1"], mesh, [Replicate()]),
        "t2": wholes["t2"],
    }
    assert is_sharded(parts)
    assert not is_sharded({"t2": wholes["t2"]})
    with published_by(parts, leads=rank == 0) as weights:
        if rank == 0:
            tensors = cast("ShardedWeights", weights)()
            return [not isinstance(t, DTensor) and torch.equal(t, wholes[name]) for name, t in tensors]
    return []


def legacy_shards(rank: int) -> bool | None:
    """ShardedTensor, which FSDP1 gives without a device mesh."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    whole = torch.arange(10.0).reshape(5, 2)
    rows = slice(0, 3) if rank == 0 else slice(3, 5)
    local = LocalShard.from_tensor_and_offsets(whole[rows].clone(), [rows.start, 0], rank)
    part = sharded_tensor.init_from_local_shards([local], 5, 2)
    with published_by({"t": part}, leads=rank == 0) as weights:
        if rank == 0:
            ((name, tensor),) = cast("ShardedWeights", weights)()
            return name == "t" and torch.equal(tensor, whole)
    return None


def _kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise KeyError(field)


def peak_of_a_large_model(rank: int, *, directory: str) -> float:
    """Megabytes above what the rank holds anyway, while a model of 200 MB in tensors of 20 MB is written."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    local = (BIG_SHAPE[0] // world_size, BIG_SHAPE[1])
    parts = {
        f"t{i}": DTensor.from_local(torch.full(local, float(10 * i + rank)), mesh, [Shard(0)])
        for i in range(BIG_TENSORS)
    }
    weights = ShardedWeights(parts)
    # Buffers and imports of the first collective are none of the model's.
    with published_by({"t": distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)])}, leads=rank == 0) as small:
        if rank == 0:
            FilesPublisher(directory).offer(small, publication())
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _kb("VmRSS")
    with weights.gathering(leads=rank == 0):
        if rank == 0:
            FilesPublisher(directory).offer(weights, publication(2))
    peak = (_kb("VmHWM") - before) / 1_000
    if rank == 0:
        (folder,) = Path(directory).glob("v00000002-*-????????????")
        stored = load_file(folder / "model.safetensors")
        for i, tensor in enumerate(stored.values()):
            assert tensor.shape == BIG_SHAPE
            for at, rows in enumerate(tensor.chunk(world_size)):
                assert bool((rows == 10 * i + at).all())
    return peak


@contextlib.contextmanager
def _disk_of(size_bytes: int) -> Iterator[None]:
    """No file of this process may be larger: writing more fails as on a full disk, in the middle of a tensor."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def disk_full(rank: int, *, directory: str) -> None:
    with published_by(sharded_model(), leads=rank == 0) as weights:
        if rank == 0:
            with _disk_of(1_100):
                FilesPublisher(directory).offer(weights, publication())


def lagging_engines(rank: int, *, address: str, run_id: str, directory: str) -> list[object]:
    """The version that the rank's session has after a publish that waited for an engine in vain, and what it raised."""
    started: list[Resumed | None] = [None]
    with BufferClient(address) as client, contextlib.ExitStack() as stack:
        if rank == 0:
            publisher = stack.enter_context(FilesPublisher(directory))
            policy = Policy(batch_groups=2)
            session = stack.enter_context(client.session(run_id, policy=policy, publisher=publisher, world_size=2))
            started[0] = session.start
            dist.broadcast_object_list(started)
        else:
            dist.broadcast_object_list(started)
            session = stack.enter_context(client.session(run_id, rank=rank, world_size=2, start=started[0]))
        raised = ""
        try:
            session.publish(sharded_model(), wait_for=1, timeout_s=0.5)
        except NotReady as error:
            raised = type(error).__name__
        return [session.version, raised]


def refused_by_the_service(rank: int) -> None:
    weights = ShardedWeights(sharded_tensors())
    with weights.gathering(leads=rank == 0):
        if rank == 0:
            for _ in weights():
                raise VersionConflict(7, 6)


def different_models(rank: int) -> None:
    parts = sharded_tensors()
    if rank == 1:
        parts["one more"] = torch.zeros(2)
    with ShardedWeights(parts).gathering(leads=rank == 0):
        pass


def unreadable_on_one(rank: int) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        if rank == 1:
            raise OSError("rank 1 cannot read its shard")
        yield "t", torch.zeros(2)

    with ShardedWeights(source).gathering(leads=rank == 0):
        pass


def led_by(rank: int, *, leaders: list[int]) -> None:
    with ShardedWeights({"t": torch.zeros(2)}).gathering(leads=rank in leaders):
        pass


def nested(rank: int, *, directory: str) -> bool:
    """Nest the two: what `gathering` has begun is not begun again by a session's own `published_by`."""
    weights = ShardedWeights(sharded_tensors())
    with weights.gathering(leads=rank == 0), published_by(weights, leads=rank == 0) as inner:
        if rank == 0:
            FilesPublisher(directory).offer(inner, publication())
        return inner is weights


def killed_while_gathering(rank: int, *, dying: int) -> None:
    """The rank `dying` is killed when it is to gather the third tensor."""
    weights = ShardedWeights(sharded_tensors())
    gather = weights._whole

    def whole(ranks: Any, index: int) -> torch.Tensor:
        if rank == dying and index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(ranks, index)

    weights._whole = whole  # type: ignore[method-assign]
    with weights.gathering(leads=rank == 0):
        if rank == 0:
            for _ in weights():
                pass


def stands_still(rank: int, *, for_s: float, group_timeout_s: float) -> None:
    """The leader neither gathers nor ends for so long, in a group of their own."""
    group = dist.new_group(timeout=timedelta(seconds=group_timeout_s))
    weights = ShardedWeights(sharded_tensors(), group=group)
    with weights.gathering(leads=rank == 0):
        if rank == 0:
            threading.Event().wait(for_s)
