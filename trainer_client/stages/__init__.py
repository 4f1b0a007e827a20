"""Stages: workers that add columns, or rewards, to groups on their way to the trainer."""

from trainer_client.stages.columns import Added
from trainer_client.stages.stage import Stage

__all__ = ["Added", "Stage"]
