"""Holds what a reader of the tree relies on: small folders, and imports that stand where they are looked for.

A folder of the product has at most 12 modules, `__init__` not counted. An import inside a function is of an optional
dependency, which a core install lacks. Of anything else it is there for the time that an import takes, which the client
promises. Then it stands in `with CALLS.under_way():` (trainer_client.forks says why), or the list below gives its
reason.

An entry of the list that is not needed has to go from it.

usage: lint_rooms.py
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_MODULES = 12
PRODUCT = (
    "buffer_cli", "buffer_conformance", "buffer_service", "buffer_wire", "rollout_lab", "rollout_workers",
    "trainer_client",
)  # fmt: skip
CORE = ("google", "grpc", "numpy", "rollout_buffer")
"""Packages that every install has, beside the product and the standard library."""

LATE = {
    "buffer_cli": "a command imports its work when it runs",
    "buffer_wire/resp/protocol.py": "the supervisor, who meets no large reply, does without numpy",
    "buffer_wire/connection/tls_files.py": "a client without TLS need not wait for ssl",
    "buffer_wire/tracing/process.py": "OpenTelemetry is there with an extra, and imported where tracing is on",
    "rollout_workers/rewarding/child.py": "a child finds these on its parent's path only",
}
"""Folders and files with imports inside functions of what is not optional, and why."""


def crowded(modules: list[Path]) -> Counter[str]:
    """Numbers of modules of the folders that have too many."""
    counts = Counter(module.parent.as_posix() for module in modules if module.name != "__init__.py")
    return Counter({folder: count for folder, count in counts.items() if count > MAX_MODULES})


def late_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of the imports inside functions that are neither optional nor calls under way."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                yield from _late(statement)


def _late(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return  # Walked by itself.
    if isinstance(node, ast.With) and any(ast.unparse(item.context_expr) == "CALLS.under_way()" for item in node.items):
        return
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    for name in names:
        root = name.partition(".")[0]
        if root in PRODUCT or root in CORE or root in sys.stdlib_module_names:
            yield getattr(node, "lineno", 0), name
    for child in ast.iter_child_nodes(node):
        yield from _late(child)


def _listed(module: Path) -> str | None:
    places = (module.as_posix(), *(folder.as_posix() for folder in module.parents))
    return next((place for place in places if place in LATE), None)


def main() -> int:
    """Prints what does not hold; returns 1 if anything does not."""
    modules = sorted(module for package in PRODUCT for module in Path(package).rglob("*.py"))
    counts = crowded(modules)
    findings = [f"{folder}: {count} modules, at most {MAX_MODULES}" for folder, count in counts.items()]
    still_late = set()
    for module in modules:
        for line, name in late_imports(ast.parse(module.read_text(encoding="utf-8"))):
            if place := _listed(module):
                still_late.add(place)
            else:
                findings.append(f"{module}:{line}: imports {name} inside a function")
    findings += [f"{place}: imports nothing inside a function; take it off LATE" for place in LATE.keys() - still_late]
    print("\n".join([*findings, f"lint_rooms: {len(findings)} findings in {len(modules)} modules"]))
    return min(len(findings), 1)


if __name__ == "__main__":
    sys.exit(main())
