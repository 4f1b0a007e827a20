"""A game of nim that a model plays against itself: who takes the last of a pile of 9 wins, one to three at a time.

Each side is a row of the sample, so that it sees the game with its own eyes: `nim 9:` is the prompt, `2` a move, ` 6:`
what the other side left. After two moves of a side its context is compacted: a further row of the side begins with the
pile alone. Whoever makes no legal move loses. The alphabet is the demo's, one token a character.
"""

from examples.demo import vocabulary
from rollout_workers.episode import Episode

PILE = 9
MOST = 3
MOVES_OF_A_ROW = 2


class Side:
    """One side of a game, in its rows."""

    def __init__(self, row: Episode, name: str) -> None:
        self.rows = [row]
        self._name = row.policy = name

    async def move(self, pile: int) -> int:
        """Take some of the pile; returns how many, 0 for what is no legal move."""
        row = self.rows[-1]
        if sum(turn.role == "assistant" for turn in row.turns) == MOVES_OF_A_ROW:
            row.finish()
            row = row.row(policy=self._name)
            self.rows.append(row)
        if row.turns:
            row.append("user", ids=vocabulary.encode(f" {pile}:"))
        else:
            await row.set_prompt(ids=vocabulary.encode(f"nim {pile}:"))
        turn = await row.generate(1)
        said = vocabulary.TOKENS[turn.ids[0]]
        taken = int(said) if said.isdecimal() else 0
        return taken if taken <= min(MOST, pile) else 0

    def end(self, reward: float) -> None:
        """Finish what it has written, with the reward of the side."""
        for row in self.rows:
            row.reward = reward
        if self.rows[-1].turns:
            self.rows[-1].finish()


async def rollout(episode: Episode) -> dict[str, float]:
    """One game; the reward is white's, 1 or −1. Two columns say whether it was played to the end, and its moves."""
    white = Side(episode, "white")
    black = Side(episode.row(), "black")
    mover, other, pile, moves = white, black, PILE, 1
    while taken := await mover.move(pile):
        pile -= taken
        mover, other = other, mover
        if not pile:
            break
        moves += 1
    # Who is to move has lost: nothing is left to take, or the move was none.
    mover.end(-1.0)
    other.end(1.0)
    return {"reward": 1.0 if other is white else -1.0, "finished": float(not pile), "moves": float(moves)}
