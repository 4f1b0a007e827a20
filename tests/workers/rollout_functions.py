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


async def compacts(episode: Episode) -> float:
    """One turn, then one in a context of its own; the reward is the sample's number."""
    await episode.generate(10)
    episode.finish()
    row = episode.row()
    await row.set_prompt(ids=[1, 9])
    await row.generate(10)
    row.finish()
    return 1.0 + episode.sample_index


async def plays(episode: Episode) -> float:
    """A game of two sides that are trained, white and black, and a rival that is not; white and the rival win."""
    episode.policy = "white"
    black, rival = episode.row(policy="black"), episode.row(policy="rival", trainable=False)
    black.reward = -1.0
    for side in (episode, black, rival):
        await side.generate(10)
        side.finish()
    return 1.0
