"""AsyncGRPOTrainer on a machine without a GPU: attention over its packed samples, in plain PyTorch.

TRL takes FlashAttention 3 for it, by the name that transformers knows it under, and asks CUDA which device it is on.
What is here is registered under the same name. It is exact and slow: a model of a few layers trains with it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def tree_attention(  # noqa: PLR0913 - as transformers calls it
    module: torch.nn.Module,  # noqa: ARG001 - transformers passes it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the segments say what is seen
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,  # noqa: ANN401 - lengths that a kernel allocates by
) -> tuple[Tensor, None]:
    """Compute attention of the segments of one row, each over its path from the root of the tree.

    `query` is float [1, heads, N, width], `key` and `value` the same with fewer heads. Segment i has the queries
    tree_cu_seqlens_q[i : i + 2], and the keys tree_kv_index[tree_cu_seqlens_k[i] : tree_cu_seqlens_k[i + 1]], of which
    the last query sees all. Returns float [1, N, heads, width]. Raises NotImplementedError for a sliding window.
    """
    if sliding_window:
        raise NotImplementedError("sliding windows are not made here")
    groups = query.shape[1] // key.shape[1]
    keys, values = (each[0][:, tree_kv_index].repeat_interleave(groups, dim=0) for each in (key, value))
    of_segments = []
    queries, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for begin, end, first, last in zip(queries, queries[1:], paths, paths[1:], strict=False):
        seen = torch.ones(end - begin, last - first, dtype=torch.bool).tril(last - first - (end - begin))
        of_segments.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[0][:, begin:end], keys[:, first:last], values[:, first:last], attn_mask=seen, scale=scaling
            )
        )
    return torch.cat(of_segments, dim=1).transpose(0, 1)[None], None


def before_construction() -> None:
    """Answer TRL's question for the device's name, which it asks as the trainer is made."""
    if not torch.cuda.is_available():
        torch.cuda.get_device_name = lambda *_: "CPU"


def after_construction() -> None:
    """Put the attention in the place of TRL's, which each trainer registers as it is made."""
    if not torch.cuda.is_available():
        AttentionInterface.register(TREE_ATTENTION, tree_attention)
