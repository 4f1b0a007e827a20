"""Episode, the object that a rollout function is given: one sample, made turn by turn.

    async def rollout(episode: Episode) -> float | None:
        while True:
            turn = await episode.generate()
            question = environment(turn.text)
            if question is None:
                episode.finish()
                return 1.0
            episode.append("tool", text=question)

Invariants: tokens that were generated are never tokenized again, so that what is trained on is what was drawn; between
two turns of the model only the environment's tokens are added, with mask 0; interruptions of the engine (pauses, lost
connections) happen inside `generate` and are not seen; after the worker was told to stop, `generate` does not return,
and the function is cancelled: it must not swallow CancelledError. When it has ended, nothing is generated for it.

A sample may have further rows (`row`), each a context of its own: one that goes on where another was compacted, one for
each sub-agent, one for each side of a game.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.types import FinishReason
from rollout_workers.errors import EpisodeFull, PromptRefused
from rollout_workers.generation.columns.given import Columns, both, check_name, returned
from rollout_workers.generation.engine_calls import EngineCalls
from rollout_workers.generation.prompts import Conversation, Prompts, Tokenizer, messages_of
from rollout_workers.generation.sample import SampleProgress, TokenIds, TurnNote
from rollout_workers.generation.trajectory.rows import Rows
from rollout_workers.generation.trajectory.turns import room_of, write_turn


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Complete turn of a sample, written by one side."""

    role: str
    """Role of the writer: "assistant" where the model wrote, else as it was appended."""
    ids: TokenIds
    """Token ids, int32 [t]; a stop token of the model is the last of them."""
    finish_reason: FinishReason | None
    """Finish reason: "stop" or "length" where the model wrote, else None."""
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    """Log-probabilities, float32 [t]; 0 where the environment wrote."""
    _decode: Callable[[TokenIds], str] = field(repr=False)

    @property
    def text(self) -> str:
        """Text of the turn, decoded without special tokens. Raises PromptRefused when the worker has no tokenizer."""
        return self._decode(self.ids)


class Episode:
    """Sample of a group that a rollout function makes, or a further row of it. For use by one function, one call at a
    time; rows may be made side by side.
    """

    def __init__(
        self,
        index: int,
        calls: EngineCalls,
        prompts: Prompts,
        tokenizer: Tokenizer | PromptRefused,
        *,
        deadline: float,
        rows: Rows | None = None,
    ) -> None:
        self.sample_index = index
        """Place of the sample in its group, from 0."""
        self.trainable = True
        """False: the trainer must not train on this row."""
        self.policy = ""
        """Name of the policy or role that writes this row, where the task has several."""
        self.reward: float | None = None
        """Reward of this row, where it is not what the function returns for the sample."""
        self.rows = Rows(calls.progress, index) if rows is None else rows
        """All rows of the sample."""
        self._index = calls.progress.begin_row(index, len(self.rows.all))
        """Index of the row in its group; see samples.ROW_STRIDE."""
        self.rows.all.append(self)
        self._calls = calls
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._deadline = deadline
        """Deadline on the monotonic clock."""
        self._before: Conversation | None = None
        self._pending: list[dict[str, Any]] = []
        self._generating: asyncio.Task[object] | None = None
        self._finish: Literal["stop", "length"] | None = None
        self._columns: dict[str, object] = {}
        self.full: EpisodeFull | None = None
        """Error of what did not fit; None while everything did."""
        self.resumed = bool(len(self.progress))
        """True when an interrupted attempt has left turns, or part of one: `generate` goes on with it."""

    # ── the task ─────────────────────────────────────────────────────────────

    @property
    def task(self) -> tasks_pb2.Task:
        """The task as it was submitted."""
        return self._calls.progress.task

    @property
    def environment(self) -> str:
        """The task's environment."""
        return self.task.environment

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The task's metadata, a JSON object. Raises ValueError when it is none."""
        found: Mapping[str, Any] = json.loads(self.task.metadata_json or "{}")
        return found

    @property
    def prompt_ids(self) -> TokenIds:
        """Prompt of the row, int32 [p]."""
        return self._calls.progress.prompt_of(self._index)

    @property
    def engine(self) -> str:
        """The engine's id."""
        return self._calls.slot.engine_id

    @property
    def engine_address(self) -> str:
        """The engine's address."""
        return self._calls.slot.info.address

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises PromptRefused when the worker has none."""
        if isinstance(self._tokenizer, PromptRefused):
            raise self._tokenizer
        return self._tokenizer

    # ── what is there ────────────────────────────────────────────────────────

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The complete turns so far; those of an interrupted attempt are there at the start if the function is
        resumable. Messages whose text was appended since the last `generate` are not among them yet.
        """
        return tuple(self._turn(note) for note in self.progress.turns)

    @property
    def room(self) -> int:
        """Tokens that still fit, the environment's and the model's together."""
        return room_of(self._calls, self._index)

    # ── acting ───────────────────────────────────────────────────────────────

    async def generate(
        self,
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """Let the model write a turn.

        It ends at a stop string or token (the task's, and these), after `max_new_tokens`, or when the context is used
        up. It also ends when the task's max_new_tokens are used up, which count for all turns of a sample together. No
        stop token comes before it has `min_new_tokens`, nor before the sample has the task's. Raises EpisodeFull when
        not one token fits.
        """
        self._check_open("generate")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise InvalidField("max_new_tokens", max_new_tokens, "at least 1")
        if not 0 <= min_new_tokens <= (most := max_new_tokens or self.task.sampling.max_new_tokens):
            raise InvalidField("min_new_tokens", min_new_tokens, f"0 to {most}")
        self._generating = asyncio.current_task()
        try:
            await self._say_pending()
            finish = await write_turn(
                self._calls, self.rows, self._index, self._deadline, most, min_new_tokens, stop, stop_token_ids
            )
        except EpisodeFull as full:
            self.full = full
            raise
        finally:
            self._generating = None
        return self._turn(self.progress.note_turn("assistant", finish))

    def append(self, role: str, *, text: str | None = None, ids: Sequence[int] | TokenIds | None = None) -> None:
        """Add what the environment says. With `text` it is a message, which the model's chat template writes when the
        next turn begins; with `ids` exactly these tokens. Raises EpisodeFull when they do not fit.
        """
        self._check_open("append")
        sample = self.progress
        if not sample.turns or len(sample) > sample.noted:
            raise RuntimeError(
                "the model's turn is not complete: call generate() first"
                if len(sample)
                else "before the first generate() there is only the prompt: set_prompt() changes it"
            )
        if (text is None) == (ids is None):
            raise TypeError("append takes either text= or ids=")
        if text is not None:
            self._pending.append({"role": role, "content": text})
            return
        if self._pending:
            raise RuntimeError("messages wait for generate(); ids cannot be put behind them")
        self._interject(role, self._checked(np.asarray(ids, np.int32)))

    async def set_prompt(
        self, messages: Conversation | None = None, *, ids: Sequence[int] | TokenIds | None = None
    ) -> None:
        """Give this sample a prompt of its own in place of the task's; only before the first `generate`. Raises
        PromptRefused, InvalidField.
        """
        self._check_open("set_prompt")
        if len(self.progress):
            raise RuntimeError("the model has written already: the prompt cannot be changed")
        if (messages is None) == (ids is None):
            raise TypeError("set_prompt takes either messages or ids=")
        if messages is not None:
            self._before = messages
            ids = await self._prompts.of_messages(self.task.task_id, messages)
        prompt = self._checked(np.asarray(ids, np.int32))
        info = self._calls.slot.info
        longest = min(info.max_input_tokens, info.context_length - 1)
        if not 1 <= len(prompt) <= longest:
            raise InvalidField("prompt", f"{len(prompt)} tokens", f"1 to {longest} for this engine")
        self.progress.prompt_ids = prompt

    def take_back(self, turns: int, reason: str = "taken_back") -> None:
        """Forget everything behind the first `turns` turns, the last of them the model's; with 0 the prompt may be set
        anew. Its tokens count as discarded for `reason`. Raises InvalidField.
        """
        self._check_open("take_back")
        kept = self.progress.turns[:turns]
        if len(kept) != turns or (kept and kept[-1].role != "assistant"):
            raise InvalidField("turns", turns, "0, or the number of a turn of the model")
        self._pending = []
        self._calls.progress.take_back(self._index, turns, reason)

    def row(self, *, trainable: bool = True, policy: str = "") -> "Episode":
        """Begin a further row of the sample: a context of its own, with the task's prompt until `set_prompt`.

        It is generated, appended to and finished as the sample itself is. In an attempt that is resumed rows come back
        with their turns, in the order in which they were begun. Rows without a turn are left out. Raises InvalidField
        for more rows than a group can have.
        """
        if self.rows.failure is not None:
            raise self.rows.failure
        made = Episode(
            self.sample_index, self._calls, self._prompts, self._tokenizer, deadline=self._deadline, rows=self.rows
        )
        made.trainable, made.policy = trainable, policy
        return made

    def finish(self, reason: Literal["stop", "length"] = "stop") -> None:
        """Finish the sample: nothing can be added to it any more.

        Messages that the model has not answered are dropped.
        """
        self._check_open("finish")
        if reason not in {"stop", "length"}:
            raise InvalidField("reason", reason, "stop or length")
        if not self.progress.turns:
            raise RuntimeError("there is nothing to finish: call generate() first")
        self._finish = reason

    def column(self, name: str, values: object) -> None:
        """Give a column of the sample, as a mapping that the function returns would; the last of a name counts. Its
        length is checked when the function returns. An interrupted attempt gives none. Raises InvalidField.
        """
        check_name(name)
        self._columns[name] = values

    # ── for the runner ───────────────────────────────────────────────────────

    @property
    def progress(self) -> SampleProgress:
        """Progress of the row so far."""
        return self._calls.progress.row(self._index)

    @property
    def generating(self) -> "asyncio.Task[object] | None":
        """Task that lets the model write, while one does."""
        return self._generating

    def end(self, *, cut: bool, wrong: bool = False) -> str:
        """Fault of the row now that the function has returned, or nothing. `cut`: nothing more fitted; `wrong`: the
        function has raised PolicyError.
        """
        written = bool(self.progress.turns)
        if (cut or wrong) and self._finish is None and written:
            self._finish = "length" if cut else "stop"
        if not written:
            return str(self.full) if self.full else "it returned without having called episode.generate()"
        return "it returned without having called episode.finish()" if self._finish is None else ""

    def keep(self, result: object, shared: Columns) -> object:
        """Keep the row's columns, and those of `shared` that it lacks; returns its reward. Raises InvalidField."""
        lengths = {"prompt": len(self.prompt_ids), "response": len(self.progress)}
        given = returned(result, **lengths)
        own = returned(self._columns, **lengths).columns
        self._calls.progress.give(self._index, {**shared, **both(given.columns, own)})
        self.progress.failure = given.failure
        return given.reward

    def settle(self) -> None:
        """Make the row what it is for the trainer."""
        row = self.progress
        row.reward = None if self.reward is None else float(self.reward)
        row.trainable, row.policy, row.finish = self.trainable, self.policy, self._finish

    # ── inside ───────────────────────────────────────────────────────────────

    def _turn(self, note: TurnNote) -> Turn:
        sample = self.progress
        ids, logprobs = sample.output_ids[note.start : note.end], sample.logprobs[note.start : note.end]
        return Turn(note.role, ids, note.finish, logprobs, self._decoded)

    def _decoded(self, ids: TokenIds) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def _check_open(self, doing: str) -> None:
        if self.rows.failure is not None:
            raise self.rows.failure
        if self._finish is not None:
            raise RuntimeError(f"{doing}() after finish()")
        if self._generating is not None:
            raise RuntimeError(f"{doing}() while generate() is under way")

    def _checked(self, ids: TokenIds) -> TokenIds:
        vocab_size = self._calls.slot.info.vocab_size
        if ids.ndim != 1:
            raise InvalidField("ids", f"shape {ids.shape}", "one dimension")
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise InvalidField("ids", f"token ids {ids.min()} to {ids.max()}", f"0 to {vocab_size - 1}")
        return ids

    def _interject(self, role: str, ids: TokenIds) -> None:
        if len(ids) > self.room:
            why = f"{len(ids)} tokens of the environment where {self.room} fit into the context"
            self.full = EpisodeFull(self.sample_index, why)
            raise self.full
        if len(ids):
            self.progress.interject(ids)
            self.progress.note_turn(role)

    async def _say_pending(self) -> None:
        """Write the messages that wait, and the generation prompt, as the chat template has them."""
        if not self._pending:
            return
        before = self._before or messages_of(self.task) or [{"role": "user", "content": "."}]
        last_id = int(self.progress.output_ids[-1])
        ids = await self._prompts.next_messages(
            self.task.task_id, before, self._pending, last_id=last_id, prompt_next=True
        )
        role = str(self._pending[0]["role"])
        self._pending = []
        self._interject(role, self._checked(ids))
