"""Rows of verl's batches: a group as the DataProto that verl's own agent loop would have made of it."""
# ruff: noqa: ANN401 - verl has no types that mypy sees

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from verl import DataProto

from buffer_wire.errors import InvalidField
from trainer_client.batch import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Layout of a group as rows of verl's: prompts padded on the left, responses on the right."""

    samples: int
    prompt_len: int
    response_len: int
    pad_token_id: int

    @classmethod
    def of(cls, config: Any, pad_token_id: int) -> "Rows":
        """Make the layout that verl's own agent loop has under `config`."""
        rollout = config.actor_rollout_ref.rollout
        return cls(
            samples=int(rollout.n),
            prompt_len=int(rollout.prompt_length),
            response_len=int(rollout.response_length),
            pad_token_id=pad_token_id,
        )

    def of_group(self, group: Group, ahead: int) -> Any:
        """Make the DataProto of a group, with versions in verl's numbers, `ahead` of the run's.

        Raises InvalidField for a group of another size, with rows or images, or longer than the layout.
        """
        if len(group.samples) != self.samples:
            limit = f"actor_rollout_ref.rollout.n, {self.samples}"
            raise InvalidField(f"group_size of task {group.task_id}", len(group.samples), limit)
        group.refuse_rows("verl takes each row for one of rollout.n samples")
        group.refuse_images("verl would train without them")
        width = self.prompt_len + self.response_len
        input_ids = torch.full((self.samples, width), self.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros((self.samples, width), dtype=torch.int64)
        loss_mask = torch.zeros((self.samples, width), dtype=torch.int64)
        logprobs, rewards = torch.zeros((self.samples, width)), torch.zeros((self.samples, width))
        first, last = [], []
        for row, sample in enumerate(group.samples):
            response = sample.tokens - sample.prompt_len
            for name, length, most in (
                ("data.max_prompt_length", sample.prompt_len, self.prompt_len),
                ("data.max_response_length", response, self.response_len),
            ):
                if length > most:
                    raise InvalidField(name, most, f"at least {length}, the tokens of a sample of {group.task_id}")
            start = self.prompt_len - sample.prompt_len
            tokens = slice(start, start + sample.tokens)
            input_ids[row, tokens] = torch.tensor(sample.token_ids, dtype=torch.int64)
            attention_mask[row, tokens] = 1
            loss_mask[row, tokens] = torch.tensor(sample.loss_mask, dtype=torch.int64)
            logprobs[row, tokens] = torch.tensor(sample.logprobs)
            rewards[row, tokens.stop - 1] = sample.reward
            versions = sample.versions[sample.prompt_len :]
            first.append(int(versions[0]) + ahead)
            last.append(int(versions[-1]) + ahead)
        return DataProto.from_dict(
            tensors={
                "prompts": input_ids[:, : self.prompt_len],
                "responses": input_ids[:, self.prompt_len :],
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(dim=-1) - 1).clamp(min=0),
                "response_mask": loss_mask[:, self.prompt_len :],
                "rollout_log_probs": logprobs[:, self.prompt_len :],
                "rm_scores": rewards[:, self.prompt_len :],
            },
            non_tensors={
                "uid": np.array([group.task_id] * self.samples, dtype=object),
                # As verl counts: one of a user and one of the model, where none are told.
                "__num_turns__": np.array([len(sample.turns) or 2 for sample in group.samples], dtype=np.int32),
                "min_global_steps": np.array(first, dtype=object),
                "max_global_steps": np.array(last, dtype=object),
            },
            meta_info={
                # Workers do not say how long they took.
                "metrics": [{"generate_sequences": 0.0, "tool_calls": 0.0}] * self.samples,
                "reward_extra_keys": [],
            },
        )
