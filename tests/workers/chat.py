"""A chat model's tokenizer for tests: a character is a token, and its template is that of ChatML."""

from collections.abc import Mapping, Sequence
from typing import Any

START, END = 1, 2
OFFSET = 3
_MARKS = {"\x01": START, "\x02": END}
_PRINTED = {START: "", END: ""}


class ChatTokenizer:
    """Token ids 1 and 2 begin and end a message; printable ASCII follows from OFFSET."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **_: object
    ) -> Any:
        text = "".join(f"\x01{message['role']}\n{message['content']}\x02\n" for message in conversation)
        text += "\x01assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [_MARKS[char] if char in _MARKS else OFFSET + ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(_PRINTED[token] if token in _PRINTED else chr(max(token - OFFSET, 0)) for token in token_ids)
