"""Scenes for AsyncBatchGenerator: ours on a real service with a scripted worker, and the original of verifiers.

A batch is generated when the scene's `release` says so.
"""

import asyncio
import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.push import Pusher, group_of_lease
from tests.support.service import ServiceProcess
from trainer_client import BufferClient, ClientOptions, SamplingParams, Task
from trainer_client.integrations.verifiers import POLICY, AsyncBatchGenerator

if TYPE_CHECKING:
    from rollout_buffer.v1 import common_pb2, tasks_pb2

DEADLINE_S = 30.0


def tasks_of(batch_id: int, count: int = 2) -> list[Task]:
    sampling = SamplingParams(max_new_tokens=16)
    return [
        Task(group_size=2, sampling=sampling, prompt_token_ids=[1, 2, 3], metadata={"batch": batch_id, "row": row})
        for row in range(count)
    ]


class ScriptedWorker:
    """Leases all tasks, and pushes the groups of a batch when it is released, the last task first."""

    def __init__(self, address: str, run_id: str) -> None:
        self.released: set[int] = set()
        self._pusher = Pusher(address, run_id)
        self._held: dict[int, list[tuple[tasks_pb2.Lease, common_pb2.WeightVersion]]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_S)
        self._pusher.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            reply = self._pusher.lease(wait_ms=50)
            for lease in reply.leases:
                batch = int(lease.task.metadata_json.partition(":")[2].partition(",")[0])
                self._held.setdefault(batch, []).append((lease, reply.published))
            for batch in [batch for batch in self._held if batch in self.released]:
                for lease, published in reversed(self._held.pop(batch)):
                    self._pusher.push(group_of_lease(lease, published))


class Ours:
    """Our generator on a service, with a worker that waits to be told."""

    def __init__(self, service: ServiceProcess, run_id: str) -> None:
        self.client = BufferClient(service.address, ClientOptions(timeout_s=DEADLINE_S))
        self.client.create_run(run_id, POLICY)
        self.run_id = run_id
        self.worker = ScriptedWorker(service.address, run_id)

    def generator(self, **options: Any) -> AsyncBatchGenerator:
        return AsyncBatchGenerator(self.client, self.run_id, **options)

    def submit(self, generator: Any, batch_id: int) -> bool:
        submitted: bool = generator.submit_batch(batch_id, tasks_of(batch_id))
        return submitted

    def release(self, batch_id: int) -> None:
        self.worker.released.add(batch_id)

    def until_generated(self, generator: Any, batches: int) -> None:
        def generated() -> bool:
            return self.client.run(self.run_id).ledger.groups.accepted.groups >= 2 * batches

        pause = threading.Event()
        while not generated():
            pause.wait(0.02)

    def close(self) -> None:
        self.worker.stop()
        self.client.close()


class Original:
    """The class of verifiers over an environment in memory."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.released: set[str] = set()

    def generator(self, **options: Any) -> Any:
        config = {"base_url": "http://nowhere", "api_key": "x"}
        config["http_client_args"] = {"limits": {"max_connections": 1}, "timeout": 1.0}  # type: ignore[assignment]
        return self.module.AsyncBatchGenerator(self, config, "model", {"max_tokens": 16}, **options)

    def submit(self, generator: Any, batch_id: int) -> bool:
        request = self.module.BatchRequest(
            batch_id=batch_id,
            env_inputs={"prompt": [f"prompt {batch_id}"] * 2, "answer": [str(batch_id)] * 2},
            processing_class=None,
            mask_env_responses=False,
            max_seq_len=-1,
            mask_truncated_completions=False,
            zero_truncated_completions=False,
            max_concurrent=1,
        )
        submitted: bool = generator.submit_batch(request)
        return submitted

    def release(self, batch_id: int) -> None:
        self.released.add(str(batch_id))

    def until_generated(self, generator: Any, batches: int) -> None:
        while len(generator.generation_times) < batches:
            time.sleep(0.005)

    def close(self) -> None:
        pass

    async def a_generate(self, inputs: dict[str, list[str]], **_: Any) -> SimpleNamespace:
        while inputs["answer"][0] not in self.released:  # noqa: ASYNC110 - another thread releases
            await asyncio.sleep(0.005)
        prompts = inputs["prompt"]
        return SimpleNamespace(prompt=prompts, completion=["x", "x"], state=[], reward=[0.0, 1.0], metrics={})

    def process_env_results_vllm(self, prompts: list[str], **_: Any) -> Any:
        ones = [[1] for _ in prompts]
        return sys.modules["verifiers.types"].ProcessedOutputs(
            prompt_ids=ones,
            prompt_mask=ones,
            completion_ids=ones,
            completion_mask=ones,
            completion_logprobs=[[0.0] for _ in prompts],
            rewards=[0.0, 1.0],
        )


def original_path() -> Path | None:
    """Tell where the class of verifiers 0.1.2 to 0.1.6 is installed."""
    found = importlib.util.find_spec("verifiers")
    path = Path(found.origin or "").parent / "trainers/async_batch_generator.py" if found is not None else Path()
    return path if path.is_file() else None


def original_module() -> ModuleType:
    """The module, loaded by its path: the package around it wants accelerators."""
    path = original_path()
    assert path is not None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
