"""Stand-ins for the samples of Miles and slime, `utils/types.py` of each; see stand_in.py."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self


@dataclass
class Sample:
    """`utils/types.py`: one prompt, and its response once there is one; what both packages know of it."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        """State of a sample."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0

    @dataclass
    class SpecInfo:
        """Counts of speculative decoding."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

    spec_info: SpecInfo = field(default_factory=SpecInfo)

    @dataclass
    class PrefixCacheInfo:
        """Counts of cached tokens."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """Every attribute; the status as its value, counts as dictionaries, other dataclasses as they are."""
        counts = {"spec_info": dict(vars(self.spec_info)), "prefix_cache_info": dict(vars(self.prefix_cache_info))}
        return {**vars(self), "status": self.status.value, **counts}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; keys that are no fields become attributes."""
        values = {
            **data,
            "status": cls.Status(data["status"]),
            "spec_info": cls.SpecInfo(**data.get("spec_info", {})),
            "prefix_cache_info": cls.PrefixCacheInfo(**data.get("prefix_cache_info", {})),
        }
        sample = cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})
        vars(sample).update(values)
        return sample


@dataclass(frozen=True)
class AdapterRef:
    """`utils/types.py` of Miles: the LoRA adapter of a sample."""

    name: str
    slot: int


@dataclass(frozen=True)
class RewardSpec:
    """`utils/types.py` of Miles: how one sample is scored."""

    rm_type: str | None = None
    custom_rm_path: str | None = None


_OF_A_GENERATION = (
    "tokens", "multimodal_train_inputs", "response", "response_length", "reward", "loss_mask", "weight_versions",
    "rollout_log_probs", "rollout_routed_experts", "rollout_indexer_topk", "non_generation_time", "spec_info",
    "prefix_cache_info", "remove_sample", "train_metadata",
)  # fmt: skip


@dataclass
class MilesSample(Sample):
    """Fields that only Miles has."""

    rollout_indexer_topk: Any = None
    opd_reverse_kl: list[float] | None = None
    adapter: AdapterRef | None = None
    reward_spec: RewardSpec | None = None
    routing_key: str | None = None

    def reset_for_retry(self) -> None:
        """Forget what was generated; the prompt and its identity stay, and what a teacher said."""
        fresh = MilesSample()
        for name in _OF_A_GENERATION:
            setattr(self, name, getattr(fresh, name))
        self.status = Sample.Status.ABORTED

    @property
    def oldest_weight_version(self) -> int | None:
        """The smallest version of any call."""
        numbers = [int(version) for version in self.weight_versions if str(version).isdigit()]
        return min(numbers) if numbers else None


@dataclass
class SlimeSample(Sample):
    """Fields that only slime has."""

    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    custom_rm_path: str | None = None
    session_id: str | None = None
