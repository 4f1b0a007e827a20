"""Groups that a real SGLang server generated, for tests of trainers that need real logprobs and no engine.

    model = write_recorded_model(tmp_path / "model")        # the weights of version 0, and their tokenizer
    with ReplayWorker(service.address, "run"), client.session("run", tasks=recorded_tasks()) as session:
        batch = next(session)                               # what the server generated for these tasks

The file holds 64 groups of 4 to 8 samples, all of version 0. Then come 16 of 4 samples that were generated while newer
versions were loaded in flight. The pause mode was retract: every token was drawn under exactly the weights of its span.
SGLang 0.5.23 on CPU, float32, temperature 1: a logprob is the log-softmax of the model's logits at the token. The
reward is the share of even token ids in the response. `python -m tests.support.recorded_groups --record` makes the file
anew (tests/support/record_groups.py), in a minute or two.

Needs grpcio, protobuf and numpy; `write_recorded_model` also safetensors.
"""

import argparse
import gzip
import json
import struct
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count as numbers
from pathlib import Path
from types import MappingProxyType
from typing import Self

import grpc
import numpy as np

from buffer_wire.codec import Delivered
from buffer_wire.connection.channel import client_options
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2, tasks_pb2, weights_pb2, weights_pb2_grpc
from rollout_buffer.v1.common_pb2 import RunRef, WeightVersion
from tests.support.push import GroupArrays, PushingWorker, SampleArrays
from tests.support.tiny_model import EOS_ID, TinyModelShape, write_random_model, write_safetensors
from trainer_client.batch import Group
from trainer_client.tasks import SamplingParams, Task

RECORDING = Path(__file__).parent / "data" / "recorded_groups.bin.gz"
SHAPE = TinyModelShape(vocab_size=259)
"""The vocabulary is the tokenizer's: three special tokens, then the 256 bytes; byte b is token 3 + b."""
GROUPS = 64
"""Recorded tasks whose groups are of version 0 alone."""
SPANNING_GROUPS = 16
"""Recorded tasks whose groups may span versions."""
SPANNING_GROUP_SIZE = 4
_RESPONSE_TOKENS = (8, 12, 16, 16, 24, 24, 32, 64)
"""Limits of the 64 tasks by turns: most are short, a few are long."""
_SPANNING_RESPONSE_TOKENS = 160
_AGAIN_S = 0.05
_LENGTH = struct.Struct("<I")


def write_recorded_model(directory: Path, *, version: int = 0) -> Path:
    """The model that generated the groups, as `version` of its weights; `directory`, as transformers loads it.

    Version 0 is a random one whose output layer is made steep enough that tokens differ in probability by factors of
    hundreds; each later version adds its own noise to version 0.
    """
    from safetensors.numpy import load_file

    # Loaded models are mapped files: one that is written over would change under them.
    file = directory / "model.safetensors"
    file.unlink(missing_ok=True)
    write_random_model(directory, seed=7, shape=SHAPE)
    weights = load_file(file)
    file.unlink()
    weights["lm_head.weight"] *= np.float32(10)
    if version:
        rng = np.random.default_rng(version)
        for name in sorted(weights):
            noise = rng.standard_normal(weights[name].shape).astype(np.float32)
            weights[name] += np.float32(0.3 * weights[name].std()) * noise
    write_safetensors(file, weights)
    return directory


def recorded_tasks(count: int | None = GROUPS, *, group_size: int | None = None) -> Iterator[Task]:
    """The tasks whose groups are recorded under version 0, always the same: `count` of them (None: endless).

    From the 65th on the prompts come again under new task ids. `group_size`: None: as recorded, 4 to 8; else at most
    4, and of each group the first samples. metadata["prompt"] is the prompt as text.
    """
    for i in numbers() if count is None else range(count):
        yield _task(f"recorded-{i:05d}", _prompt(i % GROUPS), group_size or 4 + i % 5, _RESPONSE_TOKENS[i % 8])


def spanning_tasks() -> Iterator[Task]:
    """The tasks whose recorded groups may span versions."""
    for i in range(SPANNING_GROUPS):
        yield _task(f"spanning-{i:05d}", _prompt(GROUPS + i), SPANNING_GROUP_SIZE, _SPANNING_RESPONSE_TOKENS)


def recorded_groups() -> Mapping[str, Group]:
    """Every recorded group as a trainer receives it, by task id, in the order of the tasks."""
    return MappingProxyType({group.task_id: group for group in _recorded().values()})


class ReplayWorker(PushingWorker):
    """Threads that answer every lease with what was recorded for its prompt, until the block ends.

    It is a worker with one engine, "e0", that has loaded whatever is published at once, and reports so: a group is
    stamped with the version that its lease found published (one that spans versions: its newest token is, the older
    ones stay as far behind as they were). One group after another, in the order of the leases. It may be there before
    its run and outlives restarts of the service. Raises InvalidField, when the block ends, for a task whose prompt is
    not recorded or whose group is larger than the recorded one.
    """

    def __init__(self, target: str, run_id: str, *, patience_s: float = 60) -> None:
        super().__init__(target, run_id, make=replayed, patience_s=patience_s)
        self._reporter = _EngineReporter(target, run_id, patience_s)

    def __enter__(self) -> Self:
        self._reporter.start()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        self._reporter.stop()
        super().__exit__(*raised)


class _EngineReporter:
    """A thread that follows the published weights and reports the engine ready with each."""

    def __init__(self, target: str, run_id: str, patience_s: float) -> None:
        self._target = target
        self._run_id = run_id
        self._patience_s = patience_s
        self._stopped = threading.Event()
        self._channel = grpc.insecure_channel(target, client_options())
        self._stub = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._thread = threading.Thread(target=self._follow, name="engine-reporter", daemon=True)
        self._reloads = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        # Ends the stream that the thread waits on.
        self._channel.close()
        self._thread.join(self._patience_s)

    def _follow(self) -> None:
        run = RunRef(run_id=self._run_id)
        while not self._stopped.is_set():
            try:
                for state in self._stub.WatchWeights(weights_pb2.WatchWeightsRequest(run=run)):
                    self._report(run, state.published)
            except (grpc.RpcError, ValueError):
                # No run yet, the service restarts, or the channel was closed by `stop`: the leasing thread is the one
                # that loses patience.
                self._stopped.wait(_AGAIN_S)

    def _report(self, run: RunRef, loaded: WeightVersion) -> None:
        report = weights_pb2.EngineReport(
            engine_id="e0",
            worker_id="tester",
            state=weights_pb2.ENGINE_STATE_READY,
            loaded=loaded,
            reloads=self._reloads,
        )
        self._stub.ReportEngine(weights_pb2.ReportEngineRequest(run=run, report=report), timeout=self._patience_s)
        self._reloads += 1


def replayed(lease: tasks_pb2.Lease, loaded: WeightVersion) -> GroupArrays:
    """The recorded group of the lease's prompt as the lease's result under `loaded`."""
    task = lease.task
    recorded = _recorded().get(tuple(task.prompt_token_ids))
    if recorded is None:
        raise InvalidField(f"prompt of task {task.task_id}", list(task.prompt_token_ids), "one of recorded_tasks()")
    if task.group_size > len(recorded.samples):
        limit = f"at most {len(recorded.samples)}, as recorded for this prompt"
        raise InvalidField(f"group_size of task {task.task_id}", task.group_size, limit)
    newest = recorded.tail_version
    samples = [
        SampleArrays(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            loss_mask=sample.loss_mask,
            prompt_len=sample.prompt_len,
            reward=sample.reward,
            finish_reason=groups_pb2.FinishReason.Value(f"FINISH_REASON_{sample.finish_reason.upper()}"),
            spans=[
                (max(1, loaded.term), max(0, loaded.version - newest + span.version.version), span.start, span.end)
                for span in sample.spans
            ],
        )
        for sample in recorded.samples[: task.group_size]
    ]
    return GroupArrays(
        task_id=task.task_id,
        incarnation=lease.incarnation,
        lease_id=lease.lease_id,
        environment=task.environment,
        metadata=json.loads(task.metadata_json) if task.metadata_json else {},
        samples=samples,
    )


def write_recording(groups: Iterator[Group], path: Path = RECORDING) -> None:
    """Serialized `Group` messages, each after its length in 4 bytes, all gzipped; the same groups, the same file."""
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as file:
        for group in groups:
            body = groups_pb2.Group(header=group.header, payload=bytes(group.payload)).SerializeToString()
            file.write(_LENGTH.pack(len(body)) + body)


@lru_cache(maxsize=1)
def _recorded() -> dict[tuple[int, ...], Group]:
    data = gzip.decompress(RECORDING.read_bytes())
    groups: dict[tuple[int, ...], Group] = {}
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        body = data[at : at + length]
        at += length
        spans = [s.version.version for sample in groups_pb2.Group.FromString(body).header.samples for s in sample.spans]
        group = Group.of(Delivered(body, len(groups), min(spans), max(spans)), train_version=max(spans))
        first = group.samples[0]
        groups[tuple(first.token_ids[: first.prompt_len].tolist())] = group
    return groups


def _prompt(i: int) -> str:
    return f"{17 * i % 100}+{(31 * i + 5) % 89}={'?' * (1 + i % 3)}"


def _task(task_id: str, prompt: str, group_size: int, max_new_tokens: int) -> Task:
    return Task(
        task_id=task_id,
        prompt_token_ids=[3 + byte for byte in prompt.encode()],
        group_size=group_size,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0, stop_token_ids=[EOS_ID]),
        environment="recorded",
        metadata={"prompt": prompt},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.support.recorded_groups")
    parser.add_argument("--record", action="store_true", required=True, help=f"make {RECORDING.name} anew")
    parser.parse_args()

    from tests.support.record_groups import record

    record()
