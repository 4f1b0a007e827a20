"""A rollout function whose samples need sandboxes, which are few, and now and then refused.

In the environment "program" the model names a number, a process of its own squares it, and the model goes on with the
result. In "talk" it writes one turn.
"""

import asyncio
import random
import re
import sys

from rollout_workers.episode import Episode
from rollout_workers.errors import InfrastructureError, PolicyError

TURN_TOKENS = 24
_REFUSED = 0.1
"""Share of sandboxes that are refused, as an API does that is asked too often."""
_PROGRAM = "import sys; print(int(sys.argv[1]) ** 2 % 1000)"


async def rollout(episode: Episode) -> float:
    """One sample: its reward is the share of digits in the last turn."""
    said = await episode.generate(TURN_TOKENS)
    if episode.environment == "program":
        number = number_of(said.text)
        if not number:
            # The policy's own fault: trained with this reward, and counted by this name.
            raise PolicyError("no_number", -0.1)
        episode.append("tool", text=await squared(number))
        said = await episode.generate(TURN_TOKENS)
    episode.finish()
    return sum(each.isdigit() for each in said.text) / max(len(said.text), 1)


def number_of(text: str) -> str:
    """The number near the beginning of a text; empty where there is none."""
    found = re.search(r"\d+", text[:4])
    return found[0] if found else ""


async def squared(number: str) -> str:
    """The number squared, by a sandbox. Raises InfrastructureError where there is none: the sample is tried again."""
    if random.random() < _REFUSED:
        raise InfrastructureError("no sandbox is free", retry_after_s=0.1)
    sandbox = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", _PROGRAM, number, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await sandbox.communicate()
    return f" is {answer.decode().strip()} "
