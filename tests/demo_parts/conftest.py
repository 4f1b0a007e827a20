"""One thread for torch, as in the demo, and a model that is right now and then."""

import copy

import pytest
import torch
from transformers import Qwen3ForCausalLM

from examples.demo.model import build_model
from examples.demo.tasks import ChainSums
from examples.demo.warmup import WarmUpReport, warm_up


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warmed_up() -> tuple[Qwen3ForCausalLM, WarmUpReport]:
    model = build_model(seed=5)
    return model, warm_up(model, ChainSums(seed=50))


@pytest.fixture
def model(warmed_up: tuple[Qwen3ForCausalLM, WarmUpReport]) -> Qwen3ForCausalLM:
    """A copy to train on."""
    return copy.deepcopy(warmed_up[0])
