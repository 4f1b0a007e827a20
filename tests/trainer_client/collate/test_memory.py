"""Tests of what is copied, and where to: arrays lie in the messages, a collated number is written once,
pinned at once.
"""

import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support.push import arrays_for
from tests.trainer_client.collate.test_extras import NAMES, group_of
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client.batch import Batch
from trainer_client.collate import collate, micro_batches, pack

MAKERS: dict[str, Callable[..., object]] = {
    "padded": collate,
    "packed": pack,
    "parts": lambda batch, **more: micro_batches(batch, max_tokens=9000, **more),
}


@pytest.fixture
def large() -> Batch:
    return assemble(pull_messages([arrays_for(f"t{i}", group_size=8, response_len=4000) for i in range(8)]))


def test_columns_of_every_axis_lie_in_the_received_messages() -> None:
    messages = pull_messages([group_of("a", size=3), group_of("b", size=2)], a_message=1)
    received = [np.frombuffer(message, np.uint8) for message in messages]
    batch = assemble(messages)
    for i, group in enumerate(batch.groups):
        assert np.shares_memory(np.frombuffer(group.payload, np.uint8), received[i + 1])
        for sample in group.samples:
            assert set(sample.extras) == set(NAMES)
            arrays: list[npt.NDArray[np.generic]] = [
                sample.token_ids,
                sample.logprobs,
                sample.loss_mask,
                *sample.extras.values(),
            ]
            for array in arrays:
                assert not array.flags.writeable
                assert array.size == 0 or np.shares_memory(array, received[i + 1])


def test_looking_at_samples_allocates_next_to_nothing(large: Batch) -> None:
    tracemalloc.start()
    try:
        tokens = sum(len(s.token_ids) + len(s.logprobs) + len(s.loss_mask) for s in large.samples)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tokens == 3 * large.info.total_tokens
    assert peak < 0.25 * large.received_bytes


@pytest.mark.parametrize("maker", MAKERS)
def test_each_number_is_copied_once(large: Batch, maker: str) -> None:
    """numpy's and Python's memory is traced, the tensors' is not: what is left is what goes in between."""
    list(large.samples)
    tracemalloc.start()
    try:
        made = MAKERS[maker](large)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made is not None
    assert peak < 0.1 * large.received_bytes


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_pinned_memory_without_cuda_is_refused_by_torch(maker: str) -> None:
    batch = assemble(pull_messages([arrays_for("a")]))
    with pytest.raises(RuntimeError, match="pin"):
        MAKERS[maker](batch, pin_memory=True)
    with pytest.raises(RuntimeError, match=r"pin|accelerator"):
        collate(batch).pin_memory()


@pytest.mark.parametrize("maker", MAKERS)
def test_every_tensor_is_made_in_pinned_memory(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constructors of torch are told apart by what they were asked for, since only CUDA can carry it out."""
    batch = assemble(pull_messages([group_of("a", size=2), group_of("b", size=3)]))
    asked: list[bool] = []

    def recording(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: object, pin_memory: bool = False, **more: object) -> torch.Tensor:
            asked.append(pin_memory)
            return make(*args, **more)

        return made

    for name in ("full", "zeros", "tensor"):
        monkeypatch.setattr(torch, name, recording(getattr(torch, name)))
    MAKERS[maker](batch, pin_memory=True, advantages=[1.0] * 5, extras="all")
    assert len(asked) >= 15
    assert all(asked)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_batches_move_without_blocking() -> None:
    batch = assemble(pull_messages([group_of("a", size=2)]))
    pinned = pack(batch, pin_memory=True, extras="all")
    assert pinned.token_ids.is_pinned()
    moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(moved.token_ids.cpu(), pinned.token_ids)
