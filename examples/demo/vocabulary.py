"""The demo's vocabulary: one token per character, as plain tables that need no library.

The trainer's tokenizer is built from these tables (model.py). The reward, which runs inside the worker, reads them
directly. So both ends agree on every id by construction. Ids fill the model's whole vocabulary: no id that the model
can sample lacks a meaning.
"""

from collections.abc import Sequence

PAD, EOS = "<|pad|>", "<|eos|>"
PAD_ID, EOS_ID = 0, 1

ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz.,:;!?'\"<>_%^&|#@~"
"""62 characters: with the two special tokens 64 ids, the multiple that engines pad a vocabulary to."""

TOKENS: tuple[str, ...] = (PAD, EOS, *ALPHABET)
VOCAB_SIZE = len(TOKENS)

_IDS = {character: index for index, character in enumerate(TOKENS) if index > EOS_ID}


def encode(text: str) -> list[int]:
    """Token ids of `text`. Raises ValueError for a character outside the alphabet."""
    try:
        return [_IDS[character] for character in text]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} in {text!r} is not in the demo's alphabet") from None


def decode_answer(response_ids: Sequence[int]) -> str | None:
    """The text of a response that ended by itself: characters, then one end token and nothing else.

    None for a response that was cut off, or has a special token or an unknown id inside.
    """
    if len(response_ids) == 0 or response_ids[-1] != EOS_ID:
        return None
    body = response_ids[:-1]
    if any(not EOS_ID < token < VOCAB_SIZE for token in body):
        return None
    return "".join(TOKENS[token] for token in body)
