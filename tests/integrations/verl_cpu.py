"""A platform of verl's that is the CPU, by the plugin interface that verl has for other accelerators.

VERL_USE_EXTERNAL_MODULES=tests.integrations.verl_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda: verl's own FSDP engine,
which says of itself that it is for CUDA, then runs with gloo. Ray is told of a GPU that is not there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _none(*_: Any, **__: Any) -> int:
    """Return the memory of an accelerator that is not there."""
    return 0


DEVICE = SimpleNamespace(
    **{
        **vars(torch.cpu),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _none),
        "mem_get_info": lambda: (0, 0),
        "empty_cache": _none,
        "get_device_name": lambda: "CPU",
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
)
"""Module torch.cpu, with the functions of torch.cuda's that it lacks."""


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    """The CPU as verl's accelerator: one device, of which nothing is to be managed."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


def _one_backend(make: Any) -> Any:
    """Wrap torch's init_process_group: verl names gloo for the CPU and, once more, for its accelerator."""

    def init_process_group(*args: Any, backend: str | None = None, **options: Any) -> None:
        make(*args, backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)

    return init_process_group


torch.distributed.init_process_group = _one_backend(torch.distributed.init_process_group)
