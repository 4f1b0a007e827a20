"""A rollout function with a tool: a model that may write `12+7=` and is told `19`.

The alphabet is the demo's, one token a character, so it needs no tokenizer and runs on any engine whose vocabulary has
its 64 ids. The equals sign ends a turn of the model and calls the calculator, which answers with digits; the model goes
on behind them. After at most MAX_CALLS calls it has one last turn. The reward is 1.0 where the model's last line is the
task's answer.
"""

import ast
import operator
from collections.abc import Callable

from examples.demo import vocabulary
from rollout_workers.episode import Episode

MAX_CALLS = 3
TURN_TOKENS = 32
CALL_ID = vocabulary.encode("=")[0]
UNREADABLE = "?"
"""The calculator's answer to what is no sum, difference or product of integers."""

_EXPRESSION = 24
"""Characters of an expression that are looked at."""
_RESULT = 12
"""Characters of the longest result that is told."""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


async def rollout(episode: Episode) -> float:
    """One sample. Goes on from the turns of an interrupted attempt: what is to be done next follows from them alone."""
    while True:
        turns = episode.turns
        calls = sum(turn.role == "tool" for turn in turns)
        if turns and turns[-1].role == "assistant":
            last = turns[-1]
        else:
            stop = [CALL_ID] if calls < MAX_CALLS else []
            last = await episode.generate(TURN_TOKENS, stop_token_ids=stop)
        if last.ids[-1] != CALL_ID or calls == MAX_CALLS:
            break
        answer = calculate(text_of(last.ids.tolist()[:-1]))
        episode.append("tool", ids=vocabulary.encode(answer))
    episode.finish("stop" if last.finish_reason == "stop" else "length")
    said = vocabulary.decode_answer(last.ids.tolist()) or ""
    return 1.0 if said.strip() == str(episode.metadata["answer"]) else 0.0


rollout.resumable = True  # type: ignore[attr-defined]


def calculate(text: str) -> str:
    """The value of the expression at the end of `text`, or UNREADABLE."""
    expression = _tail(text)
    try:
        value = str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError):
        return UNREADABLE
    return value if len(value) <= _RESULT else UNREADABLE


def text_of(ids: list[int]) -> str:
    """Characters of token ids; special tokens are left out."""
    return "".join(vocabulary.TOKENS[token] for token in ids if vocabulary.EOS_ID < token < vocabulary.VOCAB_SIZE)


def _tail(text: str) -> str:
    """The longest end of `text` that is written in digits, operators and brackets."""
    start = len(text)
    while start and text[start - 1] in "0123456789+-*() " and len(text) - start < _EXPRESSION:
        start -= 1
    return text[start:].strip()


def _value(node: ast.expr) -> int:
    """Raises ValueError for anything but sums, differences and products of integers."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(left), _value(right))
    raise ValueError("not a sum, difference or product")
