"""Bridge that feeds PRIME-RL's own trainer, unmodified, from the buffer.

Contract followed: prime-rl 559b447 (2026-08-21). Its trainer reads `rollouts/step_N/rank_R.bin` and writes
`broadcasts/step_N` below its output directory, N from 1. Its step N trains on v(N − 1) and makes v(N). Here that step
is step N − 1, and v(N) is version N. Nothing of prime-rl is imported.

    micro_batches   groups of a step to micro-batches of every data rank
    wire            micro-batches as the trainer decodes them
    output_dir      files below the output directory, and the trainer's position read from them
    bridge          the loop between the two
"""

from trainer_client.integrations.prime_rl.bridge import Bridge, BridgeOptions
from trainer_client.integrations.prime_rl.micro_batches import AdvantageFn, MicroBatch, Packing, pack
from trainer_client.integrations.prime_rl.wire import encode

__all__ = ["AdvantageFn", "Bridge", "BridgeOptions", "MicroBatch", "Packing", "encode", "pack"]
