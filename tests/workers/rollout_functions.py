"""Rollout functions for worker processes, which find them by name."""

from rollout_workers.episode import Episode


async def broken(episode: Episode) -> float:
    """Its environment is not there."""
    await episode.generate()
    raise ConnectionError("the sandbox does not answer")


async def two_turns(episode: Episode) -> float:
    """A tool between two turns; the reward is the number of generated tokens."""
    first = await episode.generate(8)
    episode.append("tool", ids=[7, 8])
    second = await episode.generate(8)
    episode.finish()
    return float(len(first.ids) + len(second.ids))
