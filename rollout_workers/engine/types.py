"""Types in which a rollout worker talks to an inference engine.

Responsibility: the vocabulary between the worker's loop and the engines (`SglangEngine`, `SimulatedEngine`). No
engine's wire format shows here, and nothing here needs an engine to be imported.

Invariants of every engine's answers:
- spans partition the generated tokens: the first starts at 0, each next one starts where the last ended, and the last
  ends at len(output_ids); none is empty, and neighbours differ in their label;
- logprobs[i] is the log-probability with which output_ids[i] was really drawn: after penalties, temperature, top-k,
  top-p and min-p, under the weights that its span names;
- every call ends within its deadline: with a result or with an error of rollout_workers.engine.errors.
"""

import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from rollout_workers.engine.token_rows import EngineColumn

RID_LENGTH = 32
"""Length of every request id, in characters. SGLang aborts by prefix, so no id may be the prefix of another."""

FinishReason = Literal["stop", "length", "abort"]


DecodingListener = Callable[[int], None]
"""Callback that is told by how many the requests that decode have changed."""


def nobody_counts(by: int) -> None:
    """The DecodingListener of an engine that has no other."""


def nobody_waits() -> None:
    """The `on_end` of a request whose caller waits for the whole call."""


def new_rid() -> str:
    """A fresh request id of RID_LENGTH characters."""
    return uuid.uuid4().hex


class PauseMode(enum.StrEnum):
    """Treatment of running requests when an engine is paused for new weights."""

    RETRACT = "retract"
    """Requests survive; their KV cache is computed again under the new weights. The cleanest: nothing is stale."""
    IN_PLACE = "in_place"
    """Requests survive on the KV cache of the old weights. The fastest for long contexts, at the price of mixed
    caches."""
    ABORT = "abort"
    """Requests end now with what they have (finish_reason "abort")."""


class PrefixCache(enum.StrEnum):
    """Keys and values that a request may go on with, instead of computing its input anew."""

    VERSION = "version"
    """Those of the weights that generate now: a load empties the cache, as far as no request sits in place."""
    GROUP = "group"
    """Those since the version that the request's group was begun with: a load leaves the cache alone. Exact no more."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """Image of a prompt, in its place there."""

    sha256: str
    """SHA-256 of the encoded image, in hex."""
    location: str
    """Location that it was read from; empty: it is a blob of the run."""
    path: Path
    """File with the encoded image."""
    start: int
    """First of its placeholder tokens in the prompt."""
    tokens: int
    """Number of its placeholder tokens, all of one id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Request to generate one sample, or to continue it."""

    sample_index: int
    """Place of the sample in its group, from 0. Engines hand it back and do not interpret it."""
    input_ids: npt.NDArray[np.int32]
    """Token ids, int32 [n], n >= 1: the prompt, followed by what an interrupted attempt had already generated."""
    max_new_tokens: int
    """Maximum number of new tokens, >= 1."""
    temperature: float = 1.0
    """Temperature, >= 0; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus (top-p) threshold, in (0, 1]; 1 is off."""
    top_k: int = 0
    """Number of likeliest tokens to draw from, >= 0; 0 is off."""
    min_p: float = 0.0
    """Minimum probability relative to the likeliest token's, in [0, 1]; 0 is off."""
    repetition_penalty: float = 1.0
    """Repetition penalty, in (0, 2]; 1 is off."""
    min_new_tokens: int = 0
    """Number of new tokens before which no stop token comes; at most max_new_tokens."""
    seed: int | None = None
    """Seed of the engine's randomness, which goes by it and a token's position; None: the engine's own. Engines may
    have to be started for it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sample, besides the model's own end-of-sequence token. The token itself is kept."""
    stop: tuple[str, ...] = ()
    """Strings that end the sample, needs an engine with a tokenizer. Their tokens are kept. One that lies across the
    point where a sample was interrupted is not recognized."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in order; input_ids hold their placeholders as the model sees them. Their ids are never
    drawn."""
    columns: tuple[str, ...] = ()
    """Columns to record beside log-probabilities, by the names in Task.columns."""
    experts_from: int = 0
    """Position of the first input whose routed experts are wanted, 0 to len(input_ids) - 1."""
    begun_with: str = ""
    """Label of the weights that made the first token of the request's group; empty while there is none."""
    rid: str = field(default_factory=new_rid)
    """Request id, unique among live requests of the engine, RID_LENGTH characters."""
    on_end: Callable[[], None] = field(default=nobody_waits, compare=False, repr=False)
    """Callback, from the event loop, for the request's end in the engine, while others of its call may go on. An engine
    that answers a call as a whole calls none: then the requests end with the call."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Generated tokens [start, end) came from the weights labelled `version_label`."""

    version_label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedSample:
    """Result of one request, complete or not."""

    rid: str
    sample_index: int
    output_ids: npt.NDArray[np.int32]
    """Token ids, int32 [t]: the new tokens only; a stop token is the last of them."""
    logprobs: npt.NDArray[np.float32]
    """Behaviour log-probability of each new token, float32 [t]."""
    spans: tuple[VersionSpan, ...]
    """Spans of weight versions, a partition of [0, t); empty if t is 0."""
    finish_reason: FinishReason
    columns: Mapping[str, EngineColumn] = field(default_factory=dict)
    """Columns that were asked for, by the names in Task.columns, of t tokens each. `sampling_mask`: the token ids that
    could be drawn in a token's place, itself among them; none where nothing was excluded. `routed_experts`: rows of the
    inputs from `experts_from` on, to the token before the last; of one that did not finish, perhaps fewer."""
    aborted_in_queue: bool = False
    """True if the engine gave the request up before it ran, or while it was retracted: what came back, if
    anything, may be less than what was generated."""
    fault: str = ""
    """Reason why the engine's answer to this request cannot be used, though it answered others of the same call. Then
    there are no tokens, and finish_reason is "abort". Empty when nothing is wrong."""
    cached_tokens: int = 0
    """Tokens of the request's input whose keys and values came from the engine's prefix cache, as far as it says so."""
    unusable_tokens: int = 0
    """Tokens that the engine sent for this request and that are not among output_ids: without a log-probability, or of
    an answer that is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine, whoever gave it the work."""

    running: int
    """Requests that are decoded now."""
    waiting: int
    """Requests that wait inside the engine."""
    token_usage: float
    """Part of the KV cache in use, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that an engine states about itself when it is connected."""

    name: str
    """Kind of engine, as the table of kinds names it."""
    version: str
    address: str
    model_path: str
    vocab_size: int
    """Size of the vocabulary: token ids lie in [0, vocab_size)."""
    max_input_tokens: int
    """Longest input_ids, in tokens."""
    context_length: int
    """Largest len(input_ids) + max_new_tokens, in tokens."""
    max_running_requests: int
    """Requests decoded at once; further ones wait inside the engine."""
    heeds_seeds: bool = True
    """True if the engine draws by the seeds of its requests."""
    takes_buckets: bool = False
    """True if `receive` takes tensors in buckets."""
    notices: tuple[str, ...] = ()
    """Notices for whoever runs the engine, though it works."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is broadcast to the engine."""

    name: str
    dtype: str
    """Type of the values: torch's name without its prefix, as in "bfloat16"."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A process group, and an engine's place in it; rank 0 is the sender's."""

    group_name: str
    backend: str
    """Backend of the group, "gloo" or "nccl"."""
    master_address: str
    """Address where the members meet, as the engine reaches it."""
    master_port: int
    rank: int
    """Rank of the engine, from 1."""
    world_size: int
    """Ranks in all, the sender's included."""


class Engine(Protocol):
    """Inference engine as a rollout worker sees it.

    Every method takes at most its deadline: the engine's configured one, or `deadline_s` where a call has it. Beyond
    it, it raises EngineTimeout. It raises EngineUnavailable if the engine cannot be reached, EngineRejected if it
    refuses.
    """

    on_decoding: DecodingListener
    """Callback, from the event loop, for a request that begins to decode (+1) or does so no longer (-1);
    `nobody_counts` until somebody sets it. A request decodes from its first token to its last or to the end of its
    call, pauses in between included. A request that waits inside the engine, or that has ended while others of its call
    go on, does not. Requests that an engine answers without a stream decode for as long as the answer takes."""

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        """Generate one sample per request, in the order of the requests; groups belong in one call.

        Requests that arrive while the engine is paused wait for `resume`. At the deadline, what runs is aborted and
        comes back as it is (finish_reason "abort"); EngineTimeout only if not even that comes back. Cancelling the
        call aborts its requests in the engine. Raises InvalidField for what the engine must not be sent; an EngineError
        carries as `partial` what had arrived.
        """
        ...

    @property
    def tokens_in_hand(self) -> int:
        """Tokens that have arrived of calls that are under way; 0 unless they are streamed."""
        ...

    def give_up(self, why: str) -> None:
        """End every `generate` under way with EngineUnavailable: the engine is gone, though connections do not show."""
        ...

    def take_cut_off(self) -> int:
        """Tokens that had arrived of calls that were cancelled since this was asked last; they are lost."""
        ...

    async def abort(self, rids: Sequence[str]) -> None:
        """End these requests; their `generate` returns what they have. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, and let nothing new start, until `resume`. Pausing a paused engine is allowed."""
        ...

    async def resume(self) -> None:
        """Go on. Resuming an engine that runs is allowed."""
        ...

    async def load_files(self, path: Path, version_label: str) -> None:
        """Load the weights of model directory `path` and name them `version_label`; verified when it returns.

        Loading the same files under the same label again is allowed. Raises EngineLoadFailed, whose `weights` says
        whether the old weights are still in place.
        """
        ...

    async def load_tensors(self, path: Path, version_label: str) -> None:
        """Load as `load_files` does, but read the values here and hand them over: the engine need not see `path`.

        For small models and engines on this machine; EngineLoadFailed says so for others.
        """
        ...

    async def load_adapter(self, path: Path, version_label: str) -> None:
        """Have requests that begin from now on run under the LoRA adapter in directory `path`, named `version_label`.

        For an engine that runs, and whose weights are those that it started with. Requests that run go on under what
        they began with, until they end or the engine needs the room: then the oldest end early. Weights that are loaded
        later replace adapters, and the pause before them ends what runs under one. Raises EngineLoadFailed (what was in
        force stays).
        """
        ...

    async def drop_adapter(self) -> None:
        """Have requests that begin from now on run under no adapter. None in force is no error."""
        ...

    async def check_tensors(self, tensors: Sequence[TensorSpec]) -> None:
        """Raise EngineLoadFailed (old weights kept) unless a broadcast of `tensors` is all of the engine's model."""
        ...

    async def join_group(self, process_group: ProcessGroup, *, deadline_s: float) -> None:
        """Become a member of a process group, in place of an older one of the same name.

        Returns when all members have joined. Raises EngineLoadFailed (old weights kept) if the group does not come
        about; after an EngineTimeout the engine may be stuck until the group's other members are gone.
        """
        ...

    async def leave_group(self, group_name: str) -> None:
        """Give up membership, and whatever of a `receive` was left unfinished. Not to be a member is no error."""
        ...

    async def receive(
        self,
        tensors: Sequence[TensorSpec],
        *,
        buckets: Sequence[int] = (),
        group_name: str,
        version_label: str,
        deadline_s: float,
    ) -> None:
        """Take `tensors`, broadcast in this order, as the weights named `version_label`; verified when it returns.

        `buckets`: numbers of successive tensors that come as one, of their bytes, with all of them in it; empty: each
        comes by itself. For a paused engine. Raises EngineLoadFailed, whose `weights` says whether the old ones are
        still in place.
        """
        ...

    async def loaded_version(self) -> str:
        """The label of the weights that generate now."""
        ...

    async def ready(self) -> bool:
        """True if the engine can be reached, is healthy and not paused. Raises nothing; costs no generation."""
        ...

    async def load(self) -> EngineLoad:
        """Load of the engine now. Costs no generation, and answers during a pause."""
        ...

    async def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        ...

    async def info(self) -> EngineInfo:
        """Facts that the engine states about itself."""
        ...

    def check_sampling(self, request: SampleRequest) -> None:
        """Raise InvalidField for sampling that the engine, as it was started, cannot do. For one that was asked for its
        `info`.
        """
        ...

    async def was_restarted(self) -> bool:
        """True if what answers is known to be another process than that which `info` was asked of. Costs no generation.

        Such an engine is to be connected anew: its settings may be others.
        """
        ...

    async def close(self) -> None:
        """Release connections. Requests still running are aborted; the engine itself is left running."""
        ...
