"""Lets SGLang keep routed experts without CUDA, with which it would register their memory, and fail.

The experts of each token lie in main memory, in a tensor that SGLang registers for transfers from a GPU. Here there is
none: plain memory does. SGLang looks the allocation up by the device's name, and has no entry for `cpu`.

Loaded by host_memory.pth in every interpreter of the environment. It acts once, just before SGLang's capturers are
first imported, and steps aside.
"""

from __future__ import annotations

import sys


class _PlainMemoryForCapturers:
    """An import hook that finds nothing itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        if name != "sglang.srt.state_capturer":
            return
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        import torch  # noqa: PLC0415 -- importing torch in every interpreter start would cost a second each
        from sglang.srt.mem_cache.pool_host import common  # noqa: PLC0415

        def plain(dims: tuple, dtype: torch.dtype, device: str, **_: object) -> torch.Tensor:  # type: ignore[type-arg]
            return torch.empty(dims, dtype=dtype, device=device)

        if not torch.cuda.is_available():
            common.ALLOC_MEMORY_FUNCS.setdefault("cpu", plain)


sys.meta_path.insert(0, _PlainMemoryForCapturers())  # type: ignore[arg-type]
