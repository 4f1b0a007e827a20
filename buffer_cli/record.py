"""`rollout-buffer record`: writes a run's recording to Parquet, once or for as long as the run lives."""

import signal
import sys
import threading
from pathlib import Path

import grpc

from buffer_cli.recording import Recording
from buffer_wire.channel import client_options
from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import error_of
from rollout_buffer.v1 import common_pb2, runs_pb2, runs_pb2_grpc

ROWS_PER_FILE = 50_000
BYTES_PER_FILE = 64 << 20
"""Of messages; a portion is written when either is reached, or at the end of what is there."""


def record(
    address: str, run_id: str, folder: Path, *, whole: bool, follow: bool, every_s: float, timeout_s: float
) -> int:
    """Export until the end of what is there; with `follow` again every `every_s` until SIGTERM or Ctrl-C. Returns the
    exit code.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        recording = Recording(folder, run_id, whole=whole)
    except ValueError as refusal:
        sys.stderr.write(f"error: {refusal}\n")
        return 2
    with grpc.insecure_channel(address, client_options()) as channel:
        stub = runs_pb2_grpc.RunServiceStub(channel)
        if not _records_groups(stub, address, run_id, timeout_s):
            return 1
        silent_since = 0
        while True:
            try:
                _export(stub, run_id, recording, whole=whole, timeout_s=timeout_s, stop=stop)
                silent_since = 0
            except grpc.RpcError as failure:
                error = _error(failure)
                silent_since += 1
                if not (follow and error.retryable) or silent_since * every_s > timeout_s:
                    sys.stderr.write(f"error: {error.message}\n")
                    return 1
                sys.stderr.write(f"waiting for the service at {address}: {error.message}\n")
            _say(recording, folder, last=not follow or stop.is_set())
            if not follow or stop.wait(every_s):
                break
    return 0


def _export(
    stub: runs_pb2_grpc.RunServiceStub,
    run_id: str,
    recording: Recording,
    *,
    whole: bool,
    timeout_s: float,
    stop: threading.Event,
) -> None:
    """Everything that is there now. Raises grpc.RpcError; what was written until then stays."""
    request = runs_pb2.ExportRecordsRequest(
        run=common_pb2.RunRef(run_id=run_id), after=recording.after, include_groups=whole
    )
    portion: list[runs_pb2.Record] = []
    portion_bytes = 0
    stream = stub.ExportRecords(request, timeout=max(timeout_s, 3_600))
    for message in stream:
        portion.extend(message.records)
        portion_bytes += message.ByteSize()
        if len(portion) >= ROWS_PER_FILE or portion_bytes >= BYTES_PER_FILE:
            recording.append(portion)
            portion, portion_bytes = [], 0
        if stop.is_set():
            stream.cancel()  # type: ignore[no-untyped-call]
            break
    recording.append(portion)


def _records_groups(stub: runs_pb2_grpc.RunServiceStub, address: str, run_id: str, timeout_s: float) -> bool:
    """Whether there is something to record; says what to do where there is not."""
    try:
        run = stub.GetRun(runs_pb2.GetRunRequest(run=common_pb2.RunRef(run_id=run_id)), timeout=timeout_s).run
    except grpc.RpcError as failure:
        sys.stderr.write(f"error: the service at {address}: {_error(failure).message}\n")
        return False
    if not run.policy.record_groups:
        sys.stderr.write(
            f"run {run_id!r} keeps no events at present; switch it on with: "
            f"rollout-buffer run policy {run_id} --set record_groups=true\n"
        )
    return True


def _say(recording: Recording, folder: Path, *, last: bool) -> None:
    if sys.stderr.isatty() or last:
        end = "\n" if last or not sys.stderr.isatty() else "\r"
        sys.stderr.write(f"{recording.groups} groups, {recording.events} events in {folder}{end}")
        sys.stderr.flush()


def _error(failure: grpc.RpcError) -> RolloutBufferError:
    call: grpc.Call = failure  # type: ignore[assignment]
    return error_of(call.code(), call.details() or "", call.trailing_metadata())
