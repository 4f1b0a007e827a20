"""Lets SGLang work with plain memory where it would register memory with CUDA, and fail.

- Routed experts of each token lie in a tensor that is registered for transfers from a GPU. SGLang looks the allocation
  up by the device's name, and has no entry for `cpu`.
- Adapters (LoRA) and the tables of a batch that uses them lie in pinned memory: `pin_memory=True` of torch's factories,
  and Tensor.pin_memory. Torch refuses both without CUDA.

Loaded by host_memory.pth in every interpreter of the environment. Each half acts once, just before the part of SGLang
that needs it is first imported. The second is for servers with --enable-lora alone.
"""

from __future__ import annotations

import functools
import sys

_FACTORIES = ("arange", "empty", "ones", "tensor", "zeros")


class _PlainMemory:
    """An import hook that finds nothing itself."""

    def __init__(self) -> None:
        self._left = {"sglang.srt.state_capturer": _for_capturers, "sglang.srt.lora.layers": _for_adapters}

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        if (act := self._left.pop(name, None)) is None:
            return
        import torch  # noqa: PLC0415 -- importing torch in every interpreter start would cost a second each

        if not torch.cuda.is_available():
            act(torch)


def _for_capturers(torch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    from sglang.srt.mem_cache.pool_host import common  # noqa: PLC0415

    def plain(dims: tuple, dtype: object, device: str, **_: object) -> object:  # type: ignore[type-arg]
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS.setdefault("cpu", plain)


def _for_adapters(torch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    if "--enable-lora" not in sys.argv:
        return

    def unpinned(factory):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        @functools.wraps(factory)
        def make(*args: object, pin_memory: bool = False, **options: object) -> object:  # noqa: ARG001
            return factory(*args, **options)

        return make

    for name in _FACTORIES:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


sys.meta_path.insert(0, _PlainMemory())  # type: ignore[arg-type]
