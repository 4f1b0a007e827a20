"""`python -m buffer_service.observability.estimate`: answers to pickled questions, in the order in which they come."""

import os
import pickle
import sys

from buffer_service.observability.estimate.simulated import answer

NICENESS = 10
"""Everything else on the machine goes first."""


def main() -> None:
    """Answer until standard input ends. Whoever asks is the parent, which wrote both."""
    os.nice(NICENESS)
    for asked in pickle.load(sys.stdin.buffer):  # noqa: S301
        pickle.dump(answer(asked), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
