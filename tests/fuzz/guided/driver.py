"""One target under libFuzzer, by atheris: `python -m tests.fuzz.guided.driver TARGET FOLDER [libFuzzer's flags]`.

A process of its own for each: it ends at the first failure, and its memory and time are bounded. FOLDER is where inputs
are kept that reach further, and `crash-…`, `oom-…` and `timeout-…` where one failed.
"""

import hashlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

import atheris
import structlog

from tests.fuzz.guided.targets import TARGETS, Target, kept

MAX_BYTES = 1 << 14
"""Longest input."""
INPUT_S = 20
"""Longest time that one input may take."""
MEMORY_MIB = 1_024
"""Most memory of the process: target, product and libraries have 50 to 500 MiB."""
FAILED = 77
"""Exit status where an input failed, as libFuzzer has it."""
_PLAIN = 0.4
"""Share of the mutations that are libFuzzer's own."""


def main(name: str, folder: Path, flags: list[str]) -> None:
    """Fuzz until the flags say so, or something fails. Does not return."""
    target = TARGETS[name]
    with atheris.instrument_imports(include=list(target.code)):
        module = importlib.import_module(target.module)
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    for number, data in enumerate((*module.SEEDS, *kept(name).values())):
        (folder / "corpus" / f"seed-{number}").write_bytes(data)
    argv = [
        sys.argv[0],
        f"-max_len={MAX_BYTES}",
        f"-timeout={INPUT_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-artifact_prefix={folder}/",
        "-len_control=0",
        "-print_final_stats=1",
        *flags,
        str(folder / "corpus"),
    ]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    atheris.Setup(argv, _ending(module.one, folder), custom_mutator=_mutator(target))
    atheris.Fuzz()


def _ending(one: Callable[[bytes], None], folder: Path) -> Callable[[bytes], None]:
    """End the process where an input fails: an exit in order would wait for threads that the input has left."""

    def judged(data: bytes) -> None:
        try:
            one(data)
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            name = folder / f"crash-{hashlib.sha256(data).hexdigest()[:12]}"
            name.write_bytes(data)
            traceback.print_exc()
            print(f"FAILED {name}", file=sys.stderr, flush=True)
            os._exit(FAILED)

    return judged


def _mutator(target: Target):  # type: ignore[no-untyped-def]  # noqa: ANN202 - as atheris has it
    damaged = target.damage()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < _PLAIN:
            return bytes(atheris.Mutate(data, max_size))
        return damaged(rng, data)[:max_size]

    return mutate


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
