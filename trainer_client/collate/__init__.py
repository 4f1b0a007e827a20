"""Batches as torch tensors: padded to a rectangle, packed end to end, or cut into micro-batches of either kind.

Invariants: a loss needs no more than a masked sum, because every tensor of tokens is zero wherever there is no token.
Exceptions there are versions, −1, and token ids, `pad_token_id`. The step's totals travel along, so that token-mean
losses over shards and micro-batches add up to the single-process value:

    loss = (per_token_loss * batch.loss_mask).sum() / batch.total_loss_tokens

In a micro-batch that is not `final`, the totals cover only the micro-batches so far. Sum the loss there, and divide the
gradients after the last micro-batch. Each number is copied once, from the received message into its tensor. With
`pin_memory` that tensor is page-locked.

Needs torch (`pip install rollout-buffer[torch]`), which is imported when something is collated. See docs/collation.md.
"""

from trainer_client.collate.facts import Advantages, Collated
from trainer_client.collate.named import Ragged
from trainer_client.collate.packed import PackedBatch, pack
from trainer_client.collate.padded import PaddedBatch, collate
from trainer_client.collate.splitting import micro_batches

__all__ = ["Advantages", "Collated", "PackedBatch", "PaddedBatch", "Ragged", "collate", "micro_batches", "pack"]
