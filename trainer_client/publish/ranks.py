"""Ranks of a trainer while they gather weights: their messages to each other, and the gathering of a tensor.

Invariants: every wait ends by the timeout of the process group. A failure of a collective is a PublishFailed that says
what was being done. After one, nothing more is sent.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buffer_wire.errors import InvalidField, RolloutBufferError, by_reason

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

DONE = -1
"""Message in place of a tensor's number: the leader has published."""
FAILED = -2
"""Message in place of a tensor's number: the leader could not publish; its error comes next."""
_SHOWN_CHARS = 2_000


class PublishFailed(RuntimeError):
    """Error: the leading rank could not publish, or the ranks' process group broke meanwhile."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report of a rank, sent before the gathering begins."""

    leads: bool
    tensors: str
    """Digest of its tensors' names, dtypes and shapes, in order."""
    error: str
    """Reason why the rank cannot take part; empty if it can."""


class Ranks:
    """Ranks of one process group and their messages. Rank numbers are those within the group."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidField("group", "none", "a process group: call torch.distributed.init_process_group first")
        self._dist = dist
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self.leader = 0
        on_cpu = "cpu" in dist.get_backend_config(self._group)
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        self._broken = False
        """True after a collective has failed: nobody knows then which collective the other ranks are in."""

    def exchange(self, mine: RankReport) -> list[RankReport]:
        """Exchange reports: send this rank's and return every rank's, in the order of their ranks."""
        everybody: list[Any] = [None] * self.size
        with self._as_failure("waiting for every rank to publish"):
            self._dist.all_gather_object(everybody, mine, group=self._group)
        return everybody

    def tell(self, what: int) -> None:
        """Send, as the leader, the number of the tensor to gather next, or DONE or FAILED."""
        self._broadcast(what, "telling the other ranks what to gather")

    def told(self) -> int:
        """Receive, from the leader, the number of the tensor to gather next, or DONE or FAILED."""
        return self._broadcast(0, f"waiting for rank {self.leader}, which publishes")

    def tell_failure(self, error: BaseException) -> None:
        """Send, as the leader, the error that ended the publish; nothing when the group is broken."""
        if self._broken:
            return
        detail: object = shown(error)
        if isinstance(error, RolloutBufferError):
            detail = (error.reason, error.message, dict(error.attributes))
        self.tell(FAILED)
        with self._as_failure("telling the other ranks of a failure"):
            self._dist.broadcast_object_list([detail], self._root, group=self._group, device=self._device)

    def told_failure(self) -> Exception:
        """Receive, from the leader, the error that ended the publish, as an exception."""
        box: list[Any] = [None]
        with self._as_failure(f"hearing why rank {self.leader} failed"):
            self._dist.broadcast_object_list(box, self._root, group=self._group, device=self._device)
        if isinstance(box[0], tuple):
            reason, message, attributes = box[0]
            return by_reason().get(reason, RolloutBufferError).from_wire(message, attributes)
        return PublishFailed(f"rank {self.leader} could not publish: {box[0]}")

    def gather(self, part: Any) -> "Tensor":  # noqa: ANN401 - a DTensor or a ShardedTensor
        """Gather a tensor on the leader, in the shape of the whole; the other ranks' result is of no use."""
        with self._as_failure("gathering a tensor"):
            if hasattr(part, "local_shards"):
                return self._gather_legacy(part)
            mesh = part.device_mesh
            # glibc keeps the temporary copies of an all-gather, several tensors in all; torch's own GPU allocator
            # uses them again.
            by_rows = mesh.ndim == 1 and mesh.size() == self.size and part.placements[0].is_shard(0)
            if by_rows and mesh.device_type == "cpu":
                return self._gather_rows(part)
            # Shards that are kept in host memory travel over the mesh's own device.
            whole: Tensor = part.to(mesh.device_type).full_tensor()
            return whole

    def _gather_rows(self, part: Any) -> "Tensor":  # noqa: ANN401 - a DTensor that is split by its first dimension
        """Gather by rows: every rank sends its shard straight to its place on the leader. Only the whole is
        allocated.
        """
        import torch

        dist, group = self._dist, part.device_mesh.get_group()
        mine: Tensor = part.to_local().contiguous()
        if self.rank != self.leader:
            if mine.numel():
                dist.send(mine, self._root, group=group)
            return mine
        whole: Tensor = torch.empty(part.shape, dtype=part.dtype, device=mine.device)
        # torch.chunk's: equal pieces, of which the last ones may be shorter or missing.
        pieces = torch.split(whole, max(1, -(-whole.shape[0] // self.size)))
        receiving = []
        for source, piece in zip(part.device_mesh.mesh.tolist(), pieces, strict=False):
            if source == self._root:
                piece.copy_(mine)
            elif piece.numel():
                receiving.append(dist.irecv(piece, source, group=group))
        for work in receiving:
            if work is not None:
                work.wait()
        return whole

    def _gather_legacy(self, part: Any) -> "Tensor":  # noqa: ANN401 - a ShardedTensor
        import torch

        leads = self.rank == self.leader
        out = torch.empty(part.size() if leads else 0, dtype=part.dtype, device=device_of(part))
        part.gather(dst=self.leader, out=out if leads else None)
        return out

    @property
    def _root(self) -> int:
        """Rank of the leader among all processes, which torch's calls need."""
        return self._dist.get_global_rank(self._group, self.leader) if self._group is not None else self.leader

    def _broadcast(self, what: int, doing: str) -> int:
        import torch

        told = torch.tensor([what], dtype=torch.int64, device=self._device)
        with self._as_failure(doing):
            self._dist.broadcast(told, self._root, group=self._group)
            return int(told.item())

    @contextmanager
    def _as_failure(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's errors of process groups all are
            self._broken = True
            # gloo's text: the place in its sources, what happened, advice.
            cause = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
            raise PublishFailed(f"{doing}: the process group failed on rank {self.rank}: {cause}") from error


def device_of(part: Any) -> "torch.device":  # noqa: ANN401 - a tensor of any kind
    """Return the device on which a tensor is gathered."""
    import torch

    if hasattr(part, "device_mesh"):
        return torch.device(part.device_mesh.device_type)
    if hasattr(part, "local_shards"):
        shards = part.local_shards()
        return shards[0].tensor.device if shards else torch.device("cpu")
    return part.device  # type: ignore[no-any-return]


def shown(error: BaseException) -> str:
    """Format an error for the other ranks."""
    return f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
