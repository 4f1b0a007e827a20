"""verl's fully asynchronous trainer, with a run of the buffer in the place of its rollouter and its message queue.

    def buffer(config) -> BufferSource:  # called in the process that holds the run
        client, publisher = BufferClient("127.0.0.1:50051"), FilesPublisher("/tmp/weights", serve="http", port=50061)
        return BufferSource(client=client, run_id="math", publisher=publisher, tasks=tasks())

    train(config, buffer)  # where verl.experimental.fully_async_policy.fully_async_main was started

One actor of Ray, `BufferRollouter`, has three roles: verl's rollouter, its message queue, and the receiving end of a
checkpoint engine. The sending end is registered with verl. Nothing of verl is overridden.

Followed: verl 0.9.1: `FullyAsyncTrainer`, `assemble_batch_from_rollout_samples`, `CheckpointEngineManager`, `run_ppo`.
"""

try:
    import verl.experimental.fully_async_policy.fully_async_trainer  # noqa: F401 - all that is followed comes with it
except ImportError as error:
    raise ImportError(
        "trainer_client.integrations.verl needs verl: pip install 'rollout-buffer[torch]' verl==0.9.1"
    ) from error

from trainer_client.integrations.source import BufferSource
from trainer_client.integrations.verl.rollouter import BufferRollouter
from trainer_client.integrations.verl.training import train
from trainer_client.integrations.verl.weights import BufferWeights

__all__ = ["BufferRollouter", "BufferSource", "BufferWeights", "train"]
