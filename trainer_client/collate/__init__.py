"""Batches as torch tensors: padded to a rectangle, packed end to end, or cut into micro-batches of either kind.

Invariants: a masked sum is all that a loss needs, because every tensor of tokens is zero wherever there is no token
(versions −1, token ids the given one); the step's totals travel along, so that token-mean losses over shards and
micro-batches add up to the single-process value:

    loss = (per_token_loss * batch.loss_mask).sum() / batch.total_loss_tokens

Of a round that is not `final` they are only those so far: sum there, and divide the gradients when the last one is in.
Each number is copied once, from the received message into its tensor, which with `pin_memory` is page-locked at once.

Needs torch (`pip install rollout-buffer[torch]`), which is imported when something is collated. See docs/collation.md.
"""

from trainer_client.collate.facts import Advantages, Collated
from trainer_client.collate.named import Ragged
from trainer_client.collate.packed import PackedBatch, pack
from trainer_client.collate.padded import PaddedBatch, collate
from trainer_client.collate.splitting import micro_batches

__all__ = ["Advantages", "Collated", "PackedBatch", "PaddedBatch", "Ragged", "collate", "micro_batches", "pack"]
