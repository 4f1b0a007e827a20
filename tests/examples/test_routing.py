"""Routing replay: the same routes give the same outputs, others give others, and routers learn along them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.routing.__main__ import own_routes, train_step
from examples.routing.model import EXPERTS, EXPERTS_PER_TOKEN, LAYERS, build_model, replayed, routers, save_model

IDS = torch.arange(5, 15).view(2, 5)


def batch(**more: Any) -> Any:
    """Two samples of a group, three tokens of prompt each."""
    mask = torch.tensor([[False] * 3 + [True] * 2] * 2)
    return SimpleNamespace(
        token_ids=IDS,
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        rewards=torch.tensor([0.0, 1.0]),
        group_index=torch.zeros(2, dtype=torch.int64),
        staleness=torch.zeros(2, dtype=torch.int64),
        total_loss_tokens=4,
        **more,
    )


def test_routes_that_the_model_took_give_what_it_gave_and_others_do_not() -> None:
    model = build_model(0)
    with torch.no_grad():
        own = model(input_ids=IDS).logits
    _, experts = own_routes(model, batch())
    assert experts.shape == (*IDS.shape, LAYERS, EXPERTS_PER_TOKEN)
    with torch.no_grad(), replayed(model, experts.to(torch.uint8)):
        assert torch.allclose(model(input_ids=IDS).logits, own, atol=1e-6)
    with torch.no_grad(), replayed(model, (experts + 1) % EXPERTS):
        assert (model(input_ids=IDS).logits - own).abs().max() > 0.01
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, own)


def test_a_step_is_made_along_the_engines_routes() -> None:
    model = build_model(0)
    own, experts = own_routes(model, batch())
    # The engine sent one position elsewhere: what made the second token of the first sample's response.
    taken = experts.clone()
    taken[0, 3, 1] = (taken[0, 3, 1] + 1) % EXPERTS
    with torch.no_grad(), replayed(model, taken):
        logits = model(input_ids=IDS).logits.log_softmax(-1)
    behaviour = torch.zeros(2, 5)
    behaviour[:, 1:] = logits[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [router.weight.detach().clone() for router in routers(model)]
    figures = train_step(model, optimizer, batch(logprobs=behaviour, extras={"routed_experts": taken.to(torch.uint8)}))
    assert figures.rerouted == 1 / 4
    assert figures.apart_replayed == pytest.approx(0, abs=1e-6)
    assert figures.apart == pytest.approx((own - behaviour)[:, 3:].abs().mean().item(), abs=1e-6)
    assert figures.apart > 1e-3
    assert all(not torch.equal(was, router.weight) for was, router in zip(before, routers(model), strict=True))


def test_engines_find_what_they_look_for(tmp_path: Path) -> None:
    save_model(build_model(0), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"], config["num_hidden_layers"]) == (
        EXPERTS,
        EXPERTS_PER_TOKEN,
        LAYERS,
    )
