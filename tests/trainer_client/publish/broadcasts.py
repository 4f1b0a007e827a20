"""Broadcasts: what the tests of broadcast updates send, and how long they wait."""

import torch

from tests.trainer_client.fleet import Fleet

TIMEOUT_S = 3.0


SLACK_S = 2.0


def state(value: float) -> dict[str, torch.Tensor]:
    big = torch.full((300, 700), value, dtype=torch.bfloat16)
    return {"big": big, "strided": torch.full((8, 4), value).t(), "one": torch.tensor(value)}


def sums(value: float) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in state(value).items()}


def membership(fleet: Fleet) -> int:
    return fleet.plans[-1].membership
