"""Manifests and engine reports. A manifest is kept as its deterministic bytes, so that equal ones compare equal."""

from collections.abc import Sequence
from typing import Any

from buffer_service.domain import ops
from buffer_service.rpc.convert import fields
from buffer_service.rules.totals import ENGINE_SAMPLES, RELOAD_PHASES
from buffer_wire import limits
from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from buffer_wire.messages import message_of
from buffer_wire.weights.adapter import ADAPTER_CONFIG
from rollout_buffer.v1 import weights_pb2 as pb

_STATES = {number: word for word, number in words(pb.EngineState).items()}
_HTTP = ("http://", "https://")
_SCHEMES = ("/", "file:///", *_HTTP)
_URL_CHARS = 4_096
_SAFETENSORS = ".safetensors"
_BESIDE_SAFETENSORS = (".index.json", "config.json")
_U32 = (1 << 32) - 1


def publish(request: pb.PublishRequest) -> ops.Publish:
    """A checked publish."""
    return ops.Publish(
        term=fields.term(request.term),
        version=fields.number(request.version, "version", 0, limits.MAX_VERSION),
        manifest=_manifest(request.manifest) if request.HasField("manifest") else b"",
        commit_through=request.commit_through_step if request.HasField("commit_through_step") else None,
        clock=_clock(request),
    )


def _clock(request: pb.PublishRequest) -> ops.TrainerClock | None:
    said = [name for name in ("trainer_busy_ms", "trainer_wait_ms") if request.HasField(name)]
    if not said:
        return None
    if len(said) == 1:
        raise InvalidField(said[0], getattr(request, said[0]), "set with the other of trainer_busy_ms, trainer_wait_ms")
    return ops.TrainerClock(
        busy_ms=_counter(request.trainer_busy_ms, "trainer_busy_ms"),
        wait_ms=_counter(request.trainer_wait_ms, "trainer_wait_ms"),
    )


def _counter(value: int, field: str) -> int:
    """A counter that the store computes with."""
    return fields.number(value, field, 0, limits.MAX_COUNTER)


def _manifest(manifest: pb.WeightManifest) -> bytes:
    kind = manifest.WhichOneof("kind")
    if kind is None:
        raise InvalidField("manifest.kind", "unset", "files, collective, tensors or adapter")
    if kind == "files":
        _files(manifest.files, "manifest.files")
    elif kind == "tensors":
        _files(manifest.tensors.files, "manifest.tensors.files")
        _check_tensor_files(manifest.tensors.files)
    elif kind == "adapter":
        _files(manifest.adapter.files, "manifest.adapter.files")
        _check_adapter_files(manifest.adapter.files)
    else:
        fields.number(manifest.collective.membership, "manifest.collective.membership", 1, limits.MAX_INTEGER)
    if manifest.HasField("fallback"):
        if kind != "collective":
            raise InvalidField("manifest.fallback", "set", f"unset with {kind}")
        _files(manifest.fallback, "manifest.fallback")
    return fields.size(manifest.SerializeToString(deterministic=True), "manifest", limits.MAX_MANIFEST_BYTES)


def _files(files: pb.FilesManifest, at: str) -> None:
    if not files.base_url.startswith(_SCHEMES):
        raise InvalidField(f"{at}.base_url", files.base_url, "an absolute path, file:///, http:// or https://")
    fields.line(files.base_url, f"{at}.base_url", 1, _URL_CHARS)
    if files.base_url.startswith(_HTTP):
        _http_url(files.base_url, f"{at}.base_url")
    fields.count(files.mirrors, f"{at}.mirrors", 0, 16)
    for i, mirror in enumerate(files.mirrors):
        _http_url(fields.line(mirror, f"{at}.mirrors[{i}]", 1, 256), f"{at}.mirrors[{i}]")
    fields.count(files.files, f"{at}.files", 1, 4_096)
    fields.unique((file.name for file in files.files), f"{at}.files")
    names = {file.name for file in files.files}
    for i, file in enumerate(files.files):
        _name(file.name, f"{at}.files[{i}].name")
        _size(file.size_bytes, f"{at}.files[{i}].size_bytes")
        _digest(file.sha256, f"{at}.files[{i}].sha256")
        fields.count(file.patches, f"{at}.files[{i}].patches", 0, limits.MAX_PATCHES)
        for k, patch in enumerate(file.patches):
            _name(patch.name, f"{at}.files[{i}].patches[{k}].name")
            if patch.name in names:
                raise InvalidField(f"{at}.files[{i}].patches[{k}].name", patch.name, "a name that nothing else has")
            names.add(patch.name)
            _size(patch.size_bytes, f"{at}.files[{i}].patches[{k}].size_bytes")
            _digest(patch.sha256, f"{at}.files[{i}].patches[{k}].sha256")
            _digest(patch.base_sha256, f"{at}.files[{i}].patches[{k}].base_sha256")
    if clash := limits.directory_among(names):
        raise InvalidField(f"{at}.files", clash, "no name of a file that another one lies below")


def _name(name: str, at: str) -> None:
    if not limits.is_file_name(name):
        raise InvalidField(
            at,
            name,
            'a relative path of at most 256 characters, each part at most 255 bytes, without "..", "\\" and control '
            "characters",
        )


def _http_url(url: str, at: str) -> None:
    if not limits.is_http_url(url):
        raise InvalidField(at, url, "http:// or https://, with a host and, if any, a port from 1 to 65535")


def _size(value: int, at: str) -> None:
    fields.number(value, at, 0, limits.MAX_WEIGHT_FILE_BYTES)


def _digest(sha256: bytes, at: str) -> None:
    if len(sha256) != 32:
        raise InvalidField(at, f"{len(sha256)} bytes", "32 bytes")


def _check_tensor_files(files: pb.FilesManifest) -> None:
    """Check that the manifest has tensors, and no file that a worker could not hand over. Raises InvalidField."""
    for i, file in enumerate(files.files):
        if not file.name.endswith((_SAFETENSORS, *_BESIDE_SAFETENSORS)):
            raise InvalidField(
                f"manifest.tensors.files.files[{i}].name", file.name, "*.safetensors, its *.index.json or config.json"
            )
    if not any(file.name.endswith(_SAFETENSORS) for file in files.files):
        raise InvalidField("manifest.tensors.files.files", "no *.safetensors", "at least one *.safetensors")


def _check_adapter_files(files: pb.FilesManifest) -> None:
    """Check that the manifest has what an adapter is made of, and nothing else: no pickle above all."""
    at = "manifest.adapter.files.files"
    for i, file in enumerate(files.files):
        if file.name != ADAPTER_CONFIG and not file.name.endswith(_SAFETENSORS):
            raise InvalidField(f"{at}[{i}].name", file.name, f"*{_SAFETENSORS} or {ADAPTER_CONFIG}")
    names = {file.name for file in files.files}
    if ADAPTER_CONFIG not in names or len(names) == 1:
        raise InvalidField(at, ", ".join(sorted(names)), f"{ADAPTER_CONFIG} and at least one *{_SAFETENSORS}")


def report(request: pb.ReportEngineRequest) -> ops.EngineReport:
    """A checked engine report."""
    message = request.report
    if message.state not in _STATES:
        raise InvalidField("report.state", message.state, "one of EngineState")
    fields.line(message.weights_url, "report.weights_url", 0, 256)
    if message.weights_url:
        _http_url(message.weights_url, "report.weights_url")
    fields.line(message.weights_from, "report.weights_from", 0, 512)
    return ops.EngineReport(
        engine_id=fields.name(message.engine_id, "report.engine_id"),
        worker_id=fields.name(message.worker_id, "report.worker_id"),
        state=_STATES[message.state],
        loaded=fields.version(message.loaded, "report.loaded"),
        reloads=message.reloads,
        last_reload_ms=message.last_reload_ms,
        last_error=fields.text(message.last_error, "report.last_error", 0, limits.MAX_ERROR_CHARS),
        errors=message.errors,
        membership=message.membership,
        prepared=fields.version(message.prepared, "report.prepared") if message.HasField("prepared") else None,
        weights_url=message.weights_url,
        weights_from=message.weights_from,
        wants_load=request.wants_load,
        decoded_tokens=_counter(message.decoded_tokens, "report.decoded_tokens"),
        decode_busy_ms=_counter(message.decode_busy_ms, "report.decode_busy_ms"),
        decode_request_ms=_counter(message.decode_request_ms, "report.decode_request_ms"),
        reload_counters=_reload_counters(message.reload_phases),
        **_samples(message),
    )


def _samples(message: pb.EngineReport) -> dict[str, Any]:
    """Fields of ENGINE_SAMPLES."""
    return {name: _counter(getattr(message, name), f"report.{name}") for name in ENGINE_SAMPLES}


def _reload_counters(phases: Sequence[pb.ReloadPhaseTime]) -> Sequence[int]:
    """Flat, as rules/totals.py has them. A phase that is not known here comes from a newer worker and is left out."""
    if not phases:
        return ()
    counters = [0] * (2 * len(RELOAD_PHASES))
    for i, one in enumerate(phases):
        at = f"report.reload_phases[{i}]"
        both = _counter(one.count, f"{at}.count"), _counter(one.time_ms, f"{at}.time_ms")
        if pb.RELOAD_PHASE_UNSPECIFIED < one.phase <= len(RELOAD_PHASES):
            counters[2 * one.phase - 2 : 2 * one.phase] = both
    return counters


def to_report(value: ops.EngineReport) -> pb.EngineReport:
    """The message of an engine report."""
    return message_of(pb.EngineReport, value, last_reload_ms=min(value.last_reload_ms, _U32), reload_phases=None)
