"""Manifests and engine reports. A manifest is kept as its deterministic bytes, so that equal ones compare equal."""

from buffer_service.domain import ops
from buffer_service.rpc.convert import fields
from buffer_wire import limits
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import weights_pb2 as pb

_STATES = {
    pb.ENGINE_STATE_STARTING: "starting",
    pb.ENGINE_STATE_READY: "ready",
    pb.ENGINE_STATE_LOADING: "loading",
    pb.ENGINE_STATE_QUARANTINED: "quarantined",
    pb.ENGINE_STATE_STOPPED: "stopped",
}
_TO_STATES = {name: state for state, name in _STATES.items()}
_SCHEMES = ("/", "file:///", "http://", "https://")
_U32 = (1 << 32) - 1


def publish(request: pb.PublishRequest) -> ops.Publish:
    """A checked publish."""
    return ops.Publish(
        epoch=fields.epoch(request.epoch),
        version=fields.number(request.version, "version", 0, limits.MAX_VERSION),
        manifest=_manifest(request.manifest) if request.HasField("manifest") else b"",
        commit_through=request.commit_through_step if request.HasField("commit_through_step") else None,
    )


def _manifest(manifest: pb.WeightManifest) -> bytes:
    if manifest.WhichOneof("kind") != "files":
        raise InvalidField("manifest.kind", "unset", "files")
    files = manifest.files
    if not files.base_url.startswith(_SCHEMES):
        raise InvalidField("manifest.files.base_url", files.base_url, "an absolute path, file:///, http:// or https://")
    fields.count(files.files, "manifest.files.files", 1, 4_096)
    for i, file in enumerate(files.files):
        at = f"manifest.files.files[{i}]"
        fields.text(file.name, f"{at}.name", 1, 256)
        if file.name.startswith("/") or ".." in file.name.split("/") or "\\" in file.name:
            raise InvalidField(f"{at}.name", file.name, 'a relative path without ".."')
        if len(file.sha256) != 32:
            raise InvalidField(f"{at}.sha256", f"{len(file.sha256)} bytes", "32 bytes")
    fields.unique((file.name for file in files.files), "manifest.files.files")
    return fields.size(manifest.SerializeToString(deterministic=True), "manifest", limits.MAX_MANIFEST_BYTES)


def to_watch(view: ops.WeightsView) -> pb.WatchWeightsResponse:
    """The message of the published weights."""
    return pb.WatchWeightsResponse(
        revision=view.revision,
        published=fields.to_version(view.published),
        manifest=pb.WeightManifest.FromString(view.manifest) if view.manifest else None,
        paused=view.paused,
    )


def report(message: pb.EngineReport) -> ops.EngineReport:
    """A checked engine report."""
    if message.state not in _STATES:
        raise InvalidField("report.state", message.state, "one of EngineState")
    return ops.EngineReport(
        engine_id=fields.name(message.engine_id, "report.engine_id"),
        worker_id=fields.name(message.worker_id, "report.worker_id"),
        state=_STATES[message.state],
        loaded=fields.version(message.loaded, "report.loaded"),
        reloads=message.reloads,
        last_reload_ms=message.last_reload_ms,
        last_error=fields.text(message.last_error, "report.last_error", 0, limits.MAX_ERROR_CHARS),
        errors=message.errors,
    )


def stored_report(message: pb.EngineReport) -> ops.EngineReport:
    """An engine report that the service itself has sent."""
    return ops.EngineReport(
        engine_id=message.engine_id,
        worker_id=message.worker_id,
        state=_STATES[message.state],
        loaded=ops.WeightVersion(message.loaded.epoch, message.loaded.version),
        reloads=message.reloads,
        last_reload_ms=message.last_reload_ms,
        last_error=message.last_error,
        errors=message.errors,
    )


def to_report(value: ops.EngineReport) -> pb.EngineReport:
    """The message of an engine report."""
    return pb.EngineReport(
        engine_id=value.engine_id,
        worker_id=value.worker_id,
        state=_TO_STATES[value.state],
        loaded=fields.to_version(value.loaded),
        reloads=value.reloads,
        last_reload_ms=min(value.last_reload_ms, _U32),
        last_error=value.last_error,
        errors=value.errors,
    )
