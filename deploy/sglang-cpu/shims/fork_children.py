"""Lets SGLang's server fork its scheduler and its detokenizer where it would start each as a new interpreter.

A new interpreter imports torch, transformers and SGLang again: three imports for one server, two thirds of what its
start costs. SGLang asks for them because CUDA does not survive a fork; here there is none. When the server makes its
children it has imported what they need, and neither loaded a model, computed anything nor opened a connection.

Loaded by fork_children.pth in every interpreter of the environment; it acts in a process that is told to be
`sglang.launch_server`. SGLANG_CPU_SPAWN=1 in its environment leaves SGLang as it is.
"""

from __future__ import annotations

import os
import sys


def _fork_where_spawn_is_asked_for() -> None:
    import multiprocessing  # noqa: PLC0415 -- other interpreters of the environment need not pay for it

    set_start_method = multiprocessing.set_start_method

    def with_fork(method: str | None, force: bool = False) -> None:  # noqa: FBT001, FBT002 -- as in multiprocessing
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = with_fork  # type: ignore[assignment]


if "sglang.launch_server" in sys.orig_argv and os.environ.get("SGLANG_CPU_SPAWN") != "1":
    _fork_where_spawn_is_asked_for()
