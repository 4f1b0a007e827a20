"""Targets of the guided fuzz: each is a module with SEEDS, inputs that are taken or nearly so, and `one(data)`.

`one` raises for what must not be: anything but the named errors of the boundary, or a result that breaks its promises.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.guided import damage

CORPUS = Path(__file__).parent / "corpus"
"""TARGET/NAME: an input that failed once, by its name. TARGET.grown: inputs of long runs that reach further, a line of
base64 each.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """One boundary of the product."""

    of: str
    """Module of this folder."""
    code: tuple[str, ...]
    """Packages and modules whose branches guide it."""
    share: float
    """Share of the guided inputs; a slow one has fewer."""
    damage: Callable[[], Callable[[Random, bytes], bytes]] = lambda: damage.of_bytes
    """Maker of the damage to an input; made late, as it may import the contract."""

    @property
    def module(self) -> str:
        """Name by which it is imported."""
        return f"tests.fuzz.guided.{self.of}"


TARGETS: Mapping[str, Target] = {
    "policies": Target("policies", ("buffer_service", "buffer_cli.policies"), 0.3, damage.of_policies),
    "manifests": Target("manifests", ("buffer_service.rpc", "rollout_workers.weights"), 0.2, damage.of_publishes),
    "headers": Target("headers", ("rollout_workers.engine.weight_files",), 0.2, lambda: damage.of_json),
    "patches": Target("patches", ("buffer_wire.weights",), 0.1),
    "configuration": Target("configuration", ("buffer_cli", "buffer_service", "buffer_wire", "rollout_workers"), 0.08),
    "agents": Target("agents", ("rollout_workers.agents",), 0.05, lambda: damage.of_json),
    "admin": Target("admin", ("buffer_service.admin", "buffer_service.security"), 0.04),
    "peers": Target("peers", ("rollout_workers.relay", "rollout_workers.weights"), 0.03),
}


def kept(name: str) -> dict[str, bytes]:
    """Inputs that are kept for a target, by name."""
    named = {path.name: path.read_bytes() for path in sorted((CORPUS / name).glob("*"))}
    grown = CORPUS / f"{name}.grown"
    lines = grown.read_text().split() if grown.is_file() else []
    return named | {f"grown {number}": base64.b64decode(line) for number, line in enumerate(lines)}
