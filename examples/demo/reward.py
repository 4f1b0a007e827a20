"""The demo's reward: 1 for exactly the right answer, 0 for anything else.

No credit for form: a wrong number gets 0, and so does a right one with a character more or less ("+3", "03", "3 "). A
response that did not end by itself gets 0 too. reasoning-gym's own scorer is not used because it tolerates such forms.
Needs nothing but the vocabulary's tables, for it runs inside the worker.
"""

from collections.abc import Sequence

from examples.demo import vocabulary


def exact_match(response_ids: Sequence[int], answer: str) -> float:
    """1.0 where the response's tokens (without the prompt, with the end token) spell `answer`, else 0.0."""
    return float(vocabulary.decode_answer(response_ids) == answer)
