"""Run by an interpreter whose environment is `pip install rollout_buffer-*.whl` and nothing else: says what came along.

    core/bin/python tests/packaging/core_wheel.py

Exits with a message where the wheel brings more than grpcio, numpy, protobuf and xxhash, and what these need. A file
left behind that is no module is another fault. So is a module of the client that cannot be imported without an extra
and does not name it, and anything that imports torch.
"""

import importlib
import pkgutil
import re
import sys
from importlib.metadata import distribution, distributions
from pathlib import Path

CORE = {"grpcio", "numpy", "protobuf", "xxhash"}
TOOLS = {"pip", "setuptools", "wheel"}
"""Packages that a fresh environment holds before."""
PACKAGES = ("buffer_wire", "rollout_buffer", "trainer_client", "buffer_conformance")
HEAVY = {"torch", "safetensors", "transformers", "redis", "pydantic", "structlog", "typer", "trl", "verifiers"}
DATA = ("buffer_service/admin/page", "buffer_service/store/lua")
"""Folders of files that are no modules."""
EXTRA = re.compile(r"rollout-buffer\[[a-z,]+\]")


def main() -> None:
    """Check, and print what was found."""
    check_packages()
    check_data()
    client = importlib.import_module("trainer_client")
    if not Path(str(client.__file__)).is_relative_to(sys.prefix):
        sys.exit(f"trainer_client is {client.__file__}, not the wheel's")
    heavy = HEAVY & set(sys.modules)
    if heavy:
        sys.exit(f"import trainer_client brings {sorted(heavy)}")
    for name in client.__all__:
        getattr(client, name)
    needing = modules_that_need_an_extra()
    print(f"  core wheel: {', '.join(sorted(CORE))}; modules that name an extra: {', '.join(needing) or 'none'}")


def check_packages() -> None:
    """The wheel's own requirements are the core, and installed is no more than they require in turn."""
    own = required("rollout-buffer")
    if own != CORE:
        sys.exit(f"the wheel requires {sorted(own)}, not {sorted(CORE)}")
    wanted, found = set(own), {"rollout-buffer"}
    while wanted:
        name = wanted.pop()
        found.add(name)
        wanted |= required(name) - found
    more = {normalised(each.metadata["Name"]) for each in distributions()} - found - TOOLS
    if more:
        sys.exit(f"the environment holds {sorted(more)} as well")


def check_data() -> None:
    """Every file of the checkout's DATA came along."""
    root = Path(__file__).parents[2]
    there = {str(path) for path in distribution("rollout-buffer").files or []}
    wanted = {str(path.relative_to(root)) for folder in DATA for path in (root / folder).rglob("*") if path.is_file()}
    if missing := wanted - there:
        sys.exit(f"the wheel lacks {sorted(missing)}")


def required(name: str) -> set[str]:
    """Names of the distributions that `name` requires here, those of extras left out."""
    lines = distribution(name).requires or []
    return {
        normalised(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0])
        for line in lines
        if "extra ==" not in line and not re.search(r";.*(python_version|sys_platform|platform_)", line)
    }


def normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_that_need_an_extra() -> list[str]:
    """Import every module of the core's packages; those that cannot be without an extra must say which.

    A part of an integration (trl_progress beside trl) is imported by it alone, which says so for both.
    """
    needing: list[str] = []
    silent: list[str] = []
    for package in PACKAGES:
        root = importlib.import_module(package)
        for found in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None):
            if found.name.endswith(".__main__"):
                continue
            try:
                importlib.import_module(found.name)
            except ImportError as error:
                if EXTRA.search(str(error)):
                    needing.append(found.name)
                elif not found.name.startswith(tuple(f"{name}_" for name in needing)):
                    silent.append(f"{found.name}: {error}")
    if silent:
        sys.exit("\n".join(["modules that cannot be imported, and do not say with which extra:", *silent]))
    heavy = HEAVY & set(sys.modules)
    if heavy:
        sys.exit(f"{sorted(heavy)} were imported, which are not installed")
    return needing


if __name__ == "__main__":
    main()
