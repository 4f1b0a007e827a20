"""`python -m buffer_service.observability.estimate`: a line with an answer for each line with a question, both JSON.

An empty line is the answer to a question that has none.
"""

import os
import sys

from buffer_service.observability.estimate.questions import Question
from buffer_service.observability.estimate.simulated import answer

NICENESS = 10
"""Everything else on the machine goes first."""


def main() -> None:
    """Answer until standard input ends."""
    os.nice(NICENESS)
    for line in sys.stdin:
        found = answer(Question.from_json(line))
        sys.stdout.write(f"{found.to_json() if found else ''}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
