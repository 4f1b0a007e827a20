"""A task's prompt as token ids, checked against the engine's vocabulary and context.

Chat prompts need a tokenizer: the package transformers is imported when the first one comes, not before.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from buffer_wire.errors import InvalidField
from buffer_wire.images.reading import size_of
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.types import EngineInfo, PromptImage
from rollout_workers.errors import PromptRefused
from rollout_workers.generation.images import expanded
from rollout_workers.generation.sample import TokenIds

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages for a chat template: role, content, and whatever else it reads."""

_PLACEHOLDER = "\u241fwhat the model wrote\u241f"


class Tokenizer(Protocol):
    """Methods of a transformers tokenizer that the worker uses."""

    def apply_chat_template(
        self,
        conversation: Conversation,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        return_dict: bool,
        **more: Any,  # noqa: ANN401 - tools, and whatever else a template reads
    ) -> Any:  # noqa: ANN401 - token ids, or with tokenize=False text
        """A conversation as token ids, or as text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...


class Prompts:
    """Prompts of tasks for engines of one model. `tokenizer_path` None: chat prompts are refused."""

    def __init__(self, tokenizer_path: str | None, *, load: Callable[[str], Tokenizer] | None = None) -> None:
        self._path = tokenizer_path
        self._load = load or _load_tokenizer
        self._lock = asyncio.Lock()
        self._tokenizer: Tokenizer | None = None
        self._refusal: PromptRefused | None = None
        self._processor: Any = None

    async def token_ids(self, task: tasks_pb2.Task) -> TokenIds:
        """Token ids of the task's prompt, int32 [p], p >= 1. Raises PromptRefused."""
        if task.prompt_token_ids:
            return np.asarray(task.prompt_token_ids, np.int32)
        if not task.messages:
            raise PromptRefused(task.task_id, "it has neither prompt_token_ids nor messages")
        return await self.of_messages(task.task_id, messages_of(task))

    async def with_images(
        self, task: tasks_pb2.Task, images: Sequence[PromptImage]
    ) -> tuple[TokenIds, Sequence[PromptImage]]:
        """Token ids of a prompt with these images, int32 [p], and the images in their places. Raises PromptRefused."""
        if task.prompt_token_ids or not images:
            return await self.token_ids(task), images
        ids, processor = await self.token_ids(task), await self._processor_of(task.task_id)

        def counts() -> list[int]:
            sizes = [size_of(image.path.read_bytes(), image.location or image.sha256)[::-1] for image in images]
            counted: list[int] = processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens  # noqa: SLF001 - what engines ask too
            return counted

        try:
            return expanded(task.task_id, ids, int(processor.image_token_id), await asyncio.to_thread(counts), images)
        except (AttributeError, OSError, ValueError) as error:
            why = f"images in messages need a processor that counts their tokens; submit prompt_token_ids ({error})"
            raise PromptRefused(task.task_id, why) from error

    async def _processor_of(self, task_id: str) -> Any:  # noqa: ANN401 - a processor of transformers
        async with self._lock:
            if self._processor is None:
                try:
                    self._processor = await asyncio.to_thread(_load_processor, self._path or "")
                except (ImportError, OSError, ValueError) as error:
                    why = f"images in messages need a processor, and none can be loaded from {self._path}: {error}"
                    raise PromptRefused(task_id, why) from error
            return self._processor

    async def of_messages(self, task_id: str, messages: Conversation) -> TokenIds:
        """Token ids of a conversation with the generation prompt behind it, int32 [p]. Raises PromptRefused."""
        tokenizer = await self.tokenizer(task_id)
        try:
            ids = await asyncio.to_thread(
                lambda: tokenizer.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=True, return_dict=False
                )
            )
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            raise PromptRefused(task_id, f"the chat template refuses it: {error}") from error
        if not ids:
            raise PromptRefused(task_id, "the chat template made no token of it")
        return np.asarray(ids, np.int32)

    async def next_messages(
        self, task_id: str, before: Conversation, after: Conversation, *, last_id: int, prompt_next: bool
    ) -> TokenIds:
        """Tokens that the chat template puts between a turn of the model and its next one, int32 [n].

        `before`: the conversation that the model answered; `after`: the messages that follow its answer; `last_id`: the
        last token of that answer. `prompt_next`: the generation prompt comes behind them. The answer itself is never
        tokenized again: a placeholder stands in its place, and what the template writes behind it is taken. The token
        that ends an answer is left out where the model has written it already. Raises PromptRefused.
        """
        tokenizer = await self.tokenizer(task_id)
        conversation = [*before, {"role": "assistant", "content": _PLACEHOLDER}, *after]

        def render() -> list[int]:
            text = tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=prompt_next, return_dict=False
            )
            if not isinstance(text, str) or _PLACEHOLDER not in text:
                raise ValueError("it leaves the model's answers out")
            behind = text.rpartition(_PLACEHOLDER)[2]
            ids = list(tokenizer.encode(behind, add_special_tokens=False))
            return ids[1:] if ids and ids[0] == last_id else ids

        try:
            return np.asarray(await asyncio.to_thread(render), np.int32)
        except Exception as error:  # As above.
            raise PromptRefused(task_id, f"the chat template refuses the messages that follow: {error}") from error

    async def tokenizer_or_refusal(self, task_id: str) -> Tokenizer | PromptRefused:
        """The tokenizer, or why there is none, for those who may do without: it is tried once."""
        if self._refusal is None:
            try:
                return await self.tokenizer(task_id)
            except PromptRefused as refusal:
                self._refusal = refusal
        return self._refusal

    async def tokenizer(self, task_id: str) -> Tokenizer:
        """The tokenizer, loaded once. Raises PromptRefused when there is none."""
        async with self._lock:
            if self._tokenizer is None:
                if self._path is None:
                    raise PromptRefused(task_id, "messages need a tokenizer; name one, or submit prompt_token_ids")
                try:
                    self._tokenizer = await asyncio.to_thread(self._load, self._path)
                except (ImportError, OSError, ValueError) as error:
                    why = f"messages need a tokenizer, and none can be loaded from {self._path}: {error}"
                    raise PromptRefused(task_id, why) from error
            return self._tokenizer


def messages_of(task: tasks_pb2.Task) -> list[dict[str, Any]]:
    """The task's messages as chat templates take them; of one with images the content is a list of parts."""
    return [
        {"role": message.role, "content": [_part(part) for part in message.parts] if message.parts else message.content}
        for message in task.messages
    ]


def _part(part: tasks_pb2.ContentPart) -> dict[str, str]:
    return {"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text}


def check_prompt(prompt: TokenIds, task: tasks_pb2.Task, info: EngineInfo) -> int:
    """New tokens that a sample may have: max_new_tokens, or less where the context ends. Raises InvalidField."""
    lowest, highest = int(prompt.min()), int(prompt.max())
    for token in (lowest, highest):
        if not 0 <= token < info.vocab_size:
            limit = f"token ids of 0 to {info.vocab_size - 1}"
            raise InvalidField("prompt_token_ids", f"token id {token}", limit)
    longest = min(info.max_input_tokens, info.context_length - 1)
    if len(prompt) > longest:
        raise InvalidField("prompt_token_ids", f"{len(prompt)} tokens", f"at most {longest} for this engine")
    if not task.sampling.max_new_tokens:
        raise InvalidField("sampling.max_new_tokens", 0, "at least 1")
    return min(task.sampling.max_new_tokens, info.context_length - len(prompt))


def _load_processor(path: str) -> Any:  # noqa: ANN401 - as above
    if find_spec("transformers") is None:
        raise ImportError("the package transformers is not installed")
    from transformers import AutoProcessor  # noqa: PLC0415 - as below

    return AutoProcessor.from_pretrained(path, local_files_only=True)  # type: ignore[no-untyped-call]


def _load_tokenizer(path: str) -> Tokenizer:
    if find_spec("transformers") is None:
        raise ImportError("the package transformers is not installed")
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and few workers need it

    return cast("Tokenizer", AutoTokenizer.from_pretrained(path, local_files_only=True))
