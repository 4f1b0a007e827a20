"""Trainer's end, rank 0, of a process group for broadcasting weights to engines.

It is built from torch's process group backends themselves, so that it shares nothing with the trainer's own
torch.distributed groups: no default group is needed, and none is touched. The engines build their ends with
`torch.distributed`, over a TCP store of which this end is the server. Both ends meet under this prefix of the store:

    {name}/{name}//{device}/    (torch.distributed's prefixes for a group of that name, with a store of that prefix)

Invariants: the calling thread never blocks in torch. Every call has its own time limit. Closing drops the store, which
ends the joining of everyone who waits in it, and the connections, which ends their receiving. After a failure the group
is of no more use. One thread uses it.
"""

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainer_client.publish.collective.lane import Lane
from trainer_client.publish.collective.plan import Backend

if TYPE_CHECKING:
    import torch
    from torch._C import _distributed_c10d as dist

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_LONGER_S = 5.0
"""Seconds by which the wait for a call outlasts the limit of the call itself, so that nothing is left under way."""
_WATCHDOG_S = 3_600.0
"""Seconds by which nccl's own watchdog, which would end the process, comes after the limits here."""


class GroupBroken(Exception):
    """Error: a call of the group failed, or ran into its limit. Some member is gone, or does not take part."""


class TrainerGroup:
    """Process group of `world_size` ranks under `name`; opens the meeting point at once.

    Raises OSError if it cannot.
    """

    def __init__(self, *, name: str, backend: Backend, world_size: int, port: int, timeout_s: float) -> None:
        from torch._C import _distributed_c10d as dist

        self.name = name
        self.world_size = world_size
        self.backend = backend
        self._timeout_s = timeout_s
        self._device: torch.device | None = None
        try:
            self._server: dist.TCPStore | None = self._opened(port, server=True)
            self.port: int = self._server.port
            """Port on which the others join."""
            # A connection of its own, so that this thread can look into the store while the other one waits in it.
            store: dist.Store = self._opened(self.port, server=False)
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise OSError(f"cannot open the meeting point of group {name} on port {port}: {cause}") from None
        looked_at: dist.Store = self._server
        for prefix in (name, f"{name}/", f"{_DEVICES[backend]}/"):
            store, looked_at = dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, looked_at)
        self._store: dist.Store | None = store
        self._looked_at: dist.Store | None = looked_at
        self._group: Any = None
        """Backend object of torch; None before joining and after closing."""
        self._lane = Lane(f"weights-{name}")

    def _opened(self, port: int, *, server: bool) -> "dist.TCPStore":
        from torch._C._distributed_c10d import TCPStore

        limit = timedelta(seconds=self._timeout_s)
        return TCPStore("127.0.0.1", port, is_master=server, timeout=limit, wait_for_workers=False)

    def join(self) -> Future[None]:
        """Join the group; done when everyone has (nccl: when everyone can).

        Fails with GroupBroken after the timeout.
        """
        store, self._store = self._store, None
        if store is None:
            raise RuntimeError("a group is joined once")
        limit = timedelta(seconds=self._timeout_s)

        def join() -> None:
            if self.backend == "gloo":
                from torch._C._distributed_c10d import ProcessGroupGloo

                self._group = ProcessGroupGloo(store, 0, self.world_size, timeout=limit)
            else:
                from torch._C._distributed_c10d import ProcessGroupNCCL  # not in torch for CPUs

                options = ProcessGroupNCCL.Options()
                options._timeout = limit + timedelta(seconds=_WATCHDOG_S)  # noqa: SLF001 - torch has no other way
                self._group = ProcessGroupNCCL(store, 0, self.world_size, options)
            self._group._set_sequence_number_for_group()  # noqa: SLF001 - as the others' ends do

        return self._lane.call(_as_broken(join))

    def arrived(self, ranks: range) -> frozenset[int] | None:
        """Find the ranks that have come to the meeting point; None where that cannot be seen (nccl, another torch)."""
        # gloo: each rank leaves its addresses under its number, below the number of the context.
        if self.backend != "gloo" or self._looked_at is None:
            return None
        try:
            if not self._looked_at.check(["0/0"]):
                return None
            return frozenset(rank for rank in ranks if self._looked_at.check([f"0/{rank}"]))
        except RuntimeError:
            return None

    def on_device(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Make the tensor ready to be sent: contiguous, on the backend's device."""
        import torch

        if self._device is None and self.backend == "gloo":
            self._device = torch.device("cpu")
        elif self._device is None:
            on_gpu = tensor.device.type == "cuda"
            self._device = tensor.device if on_gpu else torch.device("cuda", torch.cuda.current_device())
        return tensor.detach().to(self._device).contiguous()

    def send(self, tensor: "torch.Tensor", timeout_s: float) -> Future[None]:
        """Broadcast a tensor from `on_device`, after those sent before. Fails with GroupBroken after `timeout_s`."""

        def send() -> None:
            from torch._C._distributed_c10d import BroadcastOptions

            if self._group is None:
                raise GroupBroken("the group is closed")
            options = BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = timedelta(seconds=timeout_s)
            self._group.broadcast([tensor], options).wait(timedelta(seconds=timeout_s + _LONGER_S))

        return self._lane.call(_as_broken(send))

    def close(self) -> None:
        """Leave the group, without waiting: at once with no call under way, else when that call's limit is reached."""
        if self._server is None:
            return
        abort = self._group if self.backend == "nccl" else None
        self._server = self._looked_at = self._store = None
        if abort is not None:
            abort.abort()
        self._lane.call(self._drop)
        self._lane.end()

    def _drop(self) -> None:
        self._group = None


def _as_broken(call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            # torch's errors all are; their text has the C++ frames behind the first line.
            raise GroupBroken(str(error).partition("\n")[0]) from None

    return run
