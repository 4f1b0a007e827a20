"""Finds retired words in code, contract, pages and tests: what they named has another name now (docs/concepts.md).

A word is found in identifiers of every spelling and in prose. What means something else is allowed below, with the
reason: by a pattern everywhere, or in the files that a pattern of paths names. An entry that is not needed has to go.

usage: lint_words.py [ROOT]
"""

import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

SUFFIXES = (".css", ".html", ".js", ".json", ".lua", ".md", ".proto", ".py", ".sh", ".toml", ".yaml", ".yml")
FOLDERS = (
    ".", "bench", "buffer_cli", "buffer_conformance", "buffer_service", "buffer_wire", "deploy", "docs", "examples",
    "proto", "rollout_lab", "rollout_workers", "scripts", "tests", "trainer_client",
)  # fmt: skip
GENERATED = ("*_pb2.py*", "*_pb2_grpc.py*", "bench/results/*")

RETIRED = {
    "continuation": (r"(?i:continuations?)(?![a-z])", "partial rollout"),
    "epoch": (r"(?<![a-z])(?i:epochs?)(?![a-z])|(?<=[a-z])Epochs?(?![a-z])", "term of a trainer"),
    "round": (r"(?<![A-Za-z])(?:[Rr]ounds?|ROUNDS?)(?![a-z])|(?<=[a-z])Rounds?(?![a-z])", "micro-batch"),
    "generation": (
        r"\bmax_generations\b|\b(?:task|lease|grant|header|facts)\.generation\b|task_id/generation",
        "incarnation of a task",
    ),
    "line": (r"(?<=class )_?Lines?\b", "a class by what stands in the line, or by what a line shows"),
    "standing": (r"(?<=class )_?Standing\b", "a class by whose standing it is"),
    "look": (r"(?<=class )_?Look\b|\b_?LOOK_S\b", "poll, read, snapshot or request"),
}
"""Patterns of retired words, and what is said instead."""

EVERYWHERE = {
    "round": (r"round\(", r"[Rr]ound[- ]trip|round_trip", r"rounds? (?:up|down)\b|(?:way|go) round|rounds ΣT"),
    "epoch": (r"since the epoch|epoch_id",),
}
"""Patterns of other meanings, English and of libraries."""

ALLOWED = {
    ("continuation", "docs/concepts.md"): "the table of other names",
    ("epoch", "docs/concepts.md"): "the table of other names",
    ("epoch", "docs/collation.md"): "a pass over the data",
    ("epoch", "deploy/helm/rollout-buffer/files/store/*"): "a Sentinel's word",
    ("epoch", "examples/miles/stand_in.py"): "a pass over the data, as Miles has it",
    ("epoch", "deploy/containers/build.sh"): "SOURCE_DATE_EPOCH, of reproducible builds",
    ("epoch", "docs/coming_from/verl.md"): "an option of verl, a pass over the data",
    ("epoch", "docs/integrations/trl.md"): "an option of transformers, a pass over the data",
    ("epoch", "trainer_client/integrations/verl/rollouter.py"): "a field of verl's samples",
    ("epoch", "tests/integrations/areal_training.py"): "an option of AReaL, a pass over the data",
    ("epoch", "tests/integrations/skyrl_training.py"): "an option of SkyRL, a pass over the data",
    ("epoch", "trainer_client/integrations/miles/prompts.py"): "a pass over the data, as Miles has it",
    ("epoch", "trainer_client/integrations/skyrl.py"): "a pass over the data, as SkyRL has it",
}
"""Words in files where they mean something else, and why."""

ITSELF = ("scripts/lint_words.py", "tests/docs/test_words.py")


def findings(path: str, text: str, used: set[tuple[str, str]]) -> Iterator[str]:
    """Retired words of a file; adds to `used` the entries of ALLOWED that it needs."""
    for word, (pattern, instead) in RETIRED.items():
        found = re.compile(pattern)
        for number, line in enumerate(text.splitlines(), start=1):
            left = line
            for other in EVERYWHERE.get(word, ()):
                left = re.sub(other, "", left)
            if not found.search(left):
                continue
            allowed = [entry for entry in ALLOWED if entry[0] == word and fnmatch(path, entry[1])]
            used.update(allowed)
            if not allowed:
                yield f"{path}:{number}: {word} is {instead} now: {line.strip()[:100]}"


def files(root: Path) -> Iterator[Path]:
    """Texts of the tree that are written by hand, in order."""
    for folder in FOLDERS:
        paths = (root / folder).glob("*") if folder == "." else (root / folder).rglob("*")
        for path in sorted(paths):
            name = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and not any(fnmatch(name, one) for one in GENERATED):
                yield path


def main(root: Path) -> int:
    """Prints what is found; returns how much that is."""
    used: set[tuple[str, str]] = set()
    found: list[str] = []
    count = 0
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name not in ITSELF and ".venv" not in name:
            count += 1
            found += findings(name, path.read_text(encoding="utf-8"), used)
    found += [f"{word} in {path} is not needed; take it off ALLOWED" for word, path in ALLOWED.keys() - used]
    print("\n".join([*found, f"lint_words: {len(found)} findings in {count} files"]))
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")), 1))
