"""All targets, each in a process of its own, two at a time; what they found, and what of it is kept."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.fuzz.guided.targets import CORPUS, TARGETS, kept

SIDE_BY_SIDE = 2
GROWN_BYTES, LONGEST_GROWN = 2_500, 400
"""Bytes that are kept of a target's inputs that reach further, and of one of them."""
_SHOWN = 6_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one target."""

    name: str
    inputs: int
    branches: int
    """Branches of the product's code that were reached, as libFuzzer counts them."""
    seconds: float
    failure: str
    """End of what the process said; empty where all went well."""


def available() -> bool:
    """True where atheris can be imported: its wheels are for Linux on x86-64."""
    return subprocess.run([sys.executable, "-c", "import atheris"], capture_output=True, check=False).returncode == 0


def fuzz(names: Sequence[str], inputs: int, seed: int, *, keep: bool) -> list[Outcome]:
    """Give the targets their shares of the inputs. Blocking."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(lambda name: _fuzz(name, max(1, int(inputs * TARGETS[name].share)), seed, keep), names))


def _fuzz(name: str, inputs: int, seed: int, keep: bool) -> Outcome:
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as place:
        folder = Path(place)
        command = [sys.executable, "-m", "tests.fuzz.guided.driver", name, place, f"-runs={inputs}", f"-seed={seed}"]
        # Whatever a target puts into a temporary folder goes with this one.
        environment = {**os.environ, "TMPDIR": place}
        with (folder / "said").open("wb") as out:
            ended = subprocess.run(command, stdout=out, stderr=out, env=environment, check=False)
        said = (folder / "said").read_text(errors="replace")
        failure = ""
        if ended.returncode:
            found = [path for kind in ("crash", "oom", "timeout") for path in folder.glob(f"{kind}-*")]
            shown = [f"    {path.name} {base64.b64encode(path.read_bytes()).decode()[:_SHOWN]}" for path in found]
            lines = [line for line in said.splitlines() if not line.startswith(("#", "INFO"))]
            failure = "\n".join((*lines[-30:], "the input, in base64:", *shown))
        elif keep:
            _keep(name, folder / "corpus")
    counts = [
        int(count) for count in re.findall(r"^#(\d+)\s|units: (\d+)", said, re.MULTILINE) for count in count if count
    ]
    branches = [int(count) for count in re.findall(r"cov: (\d+)", said)]
    return Outcome(name, max(counts, default=0), max(branches, default=0), monotonic() - began, failure)


def _keep(name: str, corpus: Path) -> None:
    """Keep some of the inputs that have reached what no earlier one had: the same ones whenever they are there."""
    before = {base64.b64encode(data).decode() for label, data in kept(name).items() if label.startswith("grown ")}
    new = {
        base64.b64encode(path.read_bytes()).decode() for path in corpus.glob("*") if not path.name.startswith("seed-")
    }
    room, lines = GROWN_BYTES, []
    for line in sorted(before | new, key=lambda line: hashlib.sha256(line.encode()).digest()):
        if len(line) <= min(room, LONGEST_GROWN):
            lines.append(line)
            room -= len(line)
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.grown").write_text("".join(f"{line}\n" for line in lines))
