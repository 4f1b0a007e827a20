"""verifiers' asynchronous batch generation, with the generation done by the run's workers.

    generator = AsyncBatchGenerator(env, {"base_url": "127.0.0.1:50051", "run_id": "math"}, model_name, sampling_args)

Contract followed: `verifiers.trainers.async_batch_generator` and `async_dataloader_wrapper` of verifiers 0.1.2 to 0.1.6
(the last release that has them). What differs is said at each class.
Nothing of verifiers is imported: requests and results are dataclasses of the same fields.
"""

from trainer_client.integrations.verifiers_collector import BufferConfig
from trainer_client.integrations.verifiers_dataloader import AsyncDataLoaderWrapper
from trainer_client.integrations.verifiers_generator import AsyncBatchGenerator
from trainer_client.integrations.verifiers_ranks import BatchSlice, get_batch_slice
from trainer_client.integrations.verifiers_requests import BatchRequest
from trainer_client.integrations.verifiers_results import BatchResult, ProcessedOutputs

__all__ = [
    "AsyncBatchGenerator",
    "AsyncDataLoaderWrapper",
    "BatchRequest",
    "BatchResult",
    "BatchSlice",
    "BufferConfig",
    "ProcessedOutputs",
    "get_batch_slice",
]
