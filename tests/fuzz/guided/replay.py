"""All seeds and kept inputs, once: `python -m tests.fuzz.guided.replay [TARGET …]` prints those that fail.

Without atheris; in a process of its own, for some targets make the product's pieces small.
"""

import importlib
import sys
import traceback

from tests.fuzz.guided.targets import TARGETS, kept


def main(names: list[str]) -> int:
    """Number of the inputs that fail, at most 100."""
    failed = 0
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIOWrapper
    for name in names or TARGETS:
        target = importlib.import_module(TARGETS[name].module)
        inputs = {f"seed {number}": data for number, data in enumerate(target.SEEDS)} | kept(name)
        for label, data in inputs.items():
            try:
                target.one(data)
            except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
                failed += 1
                print(f"{name}: {label}\n{traceback.format_exc()}")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
