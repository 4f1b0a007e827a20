"""Prints how many lines each area of the product has: by hand, without tests, docs, generated code and results."""

import subprocess
from pathlib import Path

AREAS = {
    "wire contract": ("proto/*.proto",),
    "what both ends share": ("buffer_wire/*.py",),
    "service, Python": ("buffer_service/*.py",),
    "service, Lua": ("buffer_service/*.lua",),
    "service, web page": ("buffer_service/*.html", "buffer_service/*.css", "buffer_service/*.js"),
    "rollout workers": ("rollout_workers/*.py",),
    "trainer client": ("trainer_client/*.py", ":!trainer_client/integrations"),
    "trainer integrations": ("trainer_client/integrations/*.py",),
    "command line": ("buffer_cli/*.py",),
    "laboratory": ("rollout_lab/*.py",),
    "conformance kit": ("buffer_conformance/*.py",),
}


def lines_of(patterns: tuple[str, ...]) -> int:
    """Physical lines of the tracked files that match; `*` also matches across folders."""
    found = subprocess.run(["git", "ls-files", "--", *patterns], capture_output=True, text=True, check=True)
    return sum(Path(name).read_bytes().count(b"\n") for name in found.stdout.splitlines())


def main() -> None:
    """Print a Markdown table."""
    counts = {area: lines_of(patterns) for area, patterns in AREAS.items()}
    print("| area | lines |\n|---|---|")
    for area, count in (*counts.items(), ("all", sum(counts.values()))):
        print(f"| {area} | {count:,} |")


if __name__ == "__main__":
    main()
