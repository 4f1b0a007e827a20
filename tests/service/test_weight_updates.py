"""Weight updates over the wire: collective plans, permits of engines that load, manifests of every kind."""

from typing import Any

import pytest

from buffer_service.rules.totals import ENGINE_SAMPLES
from rollout_buffer.v1 import common_pb2, weights_pb2
from tests.support.rpc import Rpc, RunRpc, failure, make_plan, manifest

FILES = manifest().files
MEMBER = weights_pb2.PlanMember
TENSOR = weights_pb2.TensorSpec


def collective(**fields: Any) -> weights_pb2.WeightManifest:
    return weights_pb2.WeightManifest(collective=weights_pb2.CollectiveManifest(membership=1), **fields)


# ── collective plans ─────────────────────────────────────────────────────────


def test_a_watch_sends_every_phase_of_a_plan_until_its_version_is_published(rpc: Rpc) -> None:
    run = rpc.create()
    watch = run.watch()
    assert not next(watch).HasField("plan")
    for phase in (weights_pb2.PLAN_PHASE_PREPARE, weights_pb2.PLAN_PHASE_BROADCAST, weights_pb2.PLAN_PHASE_ABANDONED):
        plan = make_plan(phase=phase)
        reply = run.announce(plan)
        seen = next(watch)
        assert (seen.plan, seen.revision) == (plan, reply.revision)
        assert seen.published.version == 0
    run.publish(1, manifest=collective())
    published = next(watch)
    assert (published.published.version, published.HasField("plan")) == (1, False)
    assert published.manifest == collective()
    watch.cancel()


def test_a_plan_that_is_announced_again_changes_nothing(rpc: Rpc) -> None:
    run = rpc.create()
    assert run.announce(make_plan()).revision == run.announce(make_plan()).revision
    assert run.announce(make_plan(membership=2)).revision == run.get_revision()


def test_a_resume_ends_a_plan(rpc: Rpc) -> None:
    run = rpc.create()
    run.announce(make_plan())
    run.resume()
    watch = run.watch()
    assert not next(watch).HasField("plan")
    watch.cancel()


def test_a_plan_of_a_version_that_is_not_newer_is_refused(rpc: Rpc) -> None:
    run = rpc.create()
    run.publish(3)
    error = failure(lambda: run.announce(make_plan(3)))
    assert (error.reason, error.attributes["version"], error.attributes["published"]) == ("version_conflict", "3", "3")


def test_a_plan_of_a_trainer_that_was_taken_over_is_refused(rpc: Rpc) -> None:
    run = rpc.create()
    zombie = RunRpc(rpc, run.run_id)
    run.resume()
    assert failure(lambda: zombie.announce(make_plan())).reason == "stale_term"
    run.announce(make_plan(term=2))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"version": 0}, "plan.version.version"),
        ({"version": 1 << 43}, "plan.version.version"),
        ({"term": 2}, "plan.version.term"),
        ({"phase": 0}, "plan.phase"),
        ({"phase": 9}, "plan.phase"),
        ({"membership": 0}, "plan.membership"),
        ({"master_address": ""}, "plan.master_address"),
        ({"master_address": "a" * 257}, "plan.master_address"),
        ({"master_port": 0}, "plan.master_port"),
        ({"master_port": 65_536}, "plan.master_port"),
        ({"group_name": ""}, "plan.group_name"),
        ({"group_name": "a b"}, "plan.group_name"),
        ({"backend": "mpi"}, "plan.backend"),
        ({"world_size": 1}, "plan.world_size"),
        ({"timeout_ms": 99}, "plan.timeout_ms"),
        ({"timeout_ms": 3_600_001}, "plan.timeout_ms"),
        ({"members": []}, "plan.members"),
        (
            {"members": [MEMBER(engine_id=f"e{i}", rank=1 + i) for i in range(1_025)], "world_size": 2_000},
            "plan.members",
        ),
        ({"members": [MEMBER(engine_id="", rank=1)]}, "plan.members[0].engine_id"),
        ({"members": [MEMBER(engine_id="e", rank=0)]}, "plan.members[0].rank"),
        ({"members": [MEMBER(engine_id="e", rank=2)]}, "plan.members[0].rank"),
        (
            {"members": [MEMBER(engine_id="e", rank=rank) for rank in (1, 2)], "world_size": 3},
            "plan.members[1].engine_id",
        ),
        ({"members": [MEMBER(engine_id=name, rank=1) for name in "ab"], "world_size": 3}, "plan.members[1].rank"),
        ({"tensors": []}, "plan.tensors"),
        ({"tensors": [TENSOR(name="", dtype="float32")]}, "plan.tensors[0].name"),
        ({"tensors": [TENSOR(name="a" * 513, dtype="float32")]}, "plan.tensors[0].name"),
        ({"tensors": [TENSOR(name="a", dtype="torch.float32")]}, "plan.tensors[0].dtype"),
        ({"tensors": [TENSOR(name="a", dtype="")]}, "plan.tensors[0].dtype"),
        ({"tensors": [TENSOR(name="a", dtype="float32", shape=[1] * 9)]}, "plan.tensors[0].shape"),
        ({"bucket_tensors": [2]}, "plan.bucket_tensors"),
        ({"bucket_tensors": [1, 0]}, "plan.bucket_tensors"),
        ({"tensors": [TENSOR(name="a", dtype="float32")] * 2}, "plan.tensors[1].name"),
        ({"tensors": [TENSOR(name="a", dtype="int8")] * 65_537}, "plan.tensors"),
        ({"tensors": [TENSOR(name=f"{i:0512}", dtype="float32") for i in range(2_048)]}, "plan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_plan_names_its_field(rpc: Rpc, fields: dict[str, Any], field: str) -> None:
    run = rpc.create()
    before = run.get_revision()
    error = failure(lambda: run.announce(make_plan(**fields)))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", field)
    assert run.get_revision() == before


# ── what trainers and engines have counted ───────────────────────────────────


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"trainer_busy_ms": 1}, "trainer_busy_ms"),
        ({"trainer_wait_ms": 0}, "trainer_wait_ms"),
        ({"trainer_busy_ms": 1 << 48, "trainer_wait_ms": 0}, "trainer_busy_ms"),
    ],
    ids=str,
)
def test_a_trainer_says_both_of_its_times_within_their_bounds(rpc: Rpc, said: dict[str, int], field: str) -> None:
    run = rpc.create()
    error = failure(lambda: run.publish(1, **said))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", field)
    run.publish(1, trainer_busy_ms=0, trainer_wait_ms=(1 << 48) - 1)
    assert run.get().statistics.trainer_wait_ms == (1 << 48) - 1


def test_counters_of_engines_travel_into_the_runs_statistics(rpc: Rpc) -> None:
    run = rpc.create()
    run.report("e", decoded_tokens=0, decode_busy_ms=0, decode_request_ms=0)
    run.report("e", decoded_tokens=5, decode_busy_ms=6, decode_request_ms=7)
    run.report("e", decoded_tokens=9, decode_busy_ms=6, decode_request_ms=8)
    state = run.get()
    statistics = state.statistics
    assert (statistics.decoded_tokens, statistics.decode_busy_ms, statistics.decode_request_ms) == (9, 6, 8)
    assert state.engines[0].decoded_tokens == 9
    error = failure(lambda: run.report("e", decoded_tokens=1 << 48))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "report.decoded_tokens")


# ── manifests ────────────────────────────────────────────────────────────────


def patched(**fields: object) -> weights_pb2.WeightManifest:
    """Files of which the first has a patch."""
    patch = weights_pb2.WeightPatch(name="a.patch", sha256=bytes(32), base_sha256=bytes(32))
    patch.MergeFrom(weights_pb2.WeightPatch(**fields))  # type: ignore[arg-type]
    found = weights_pb2.WeightManifest(files=FILES)
    found.files.files[0].patches.append(patch)
    return found


def adapter(*names: str) -> weights_pb2.WeightManifest:
    files = [weights_pb2.WeightFile(name=name, sha256=bytes(32)) for name in names]
    listed = weights_pb2.FilesManifest(base_url="http://trainer:8000/1.1", files=files)
    return weights_pb2.WeightManifest(adapter=weights_pb2.AdapterManifest(files=listed))


@pytest.mark.parametrize(
    "given",
    [
        collective(),
        collective(fallback=FILES),
        patched(size_bytes=7),
        weights_pb2.WeightManifest(tensors=weights_pb2.TensorsManifest(files=FILES)),
        weights_pb2.WeightManifest(
            tensors=weights_pb2.TensorsManifest(
                files=weights_pb2.FilesManifest(
                    base_url="http://trainer:8000/1.1",
                    files=[
                        weights_pb2.WeightFile(name=name, sha256=bytes(32))
                        for name in ("a-1.safetensors", "model.safetensors.index.json", "config.json")
                    ],
                )
            )
        ),
        adapter("adapter_config.json", "adapter_model.safetensors"),
    ],
    ids=["collective", "fallback", "patches", "tensors", "tensors and their index", "adapter"],
)
def test_a_manifest_of_every_kind_is_watched_as_it_was_published(rpc: Rpc, given: weights_pb2.WeightManifest) -> None:
    run = rpc.create()
    run.publish(1, manifest=given)
    watch = run.watch()
    assert next(watch).manifest == given
    watch.cancel()


def bad_files(name: str) -> weights_pb2.FilesManifest:
    return manifest(name=name).files


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (weights_pb2.WeightManifest(fallback=FILES), "manifest.kind"),
        (adapter("adapter_config.json", "adapter_model.bin"), "manifest.adapter.files.files[1].name"),
        (adapter("adapter_config.json"), "manifest.adapter.files.files"),
        (adapter("adapter_model.safetensors"), "manifest.adapter.files.files"),
        (weights_pb2.WeightManifest(files=FILES, fallback=FILES), "manifest.fallback"),
        (weights_pb2.WeightManifest(collective=weights_pb2.CollectiveManifest()), "manifest.collective.membership"),
        (collective(fallback=bad_files("../a")), "manifest.fallback.files[0].name"),
        (collective(fallback=weights_pb2.FilesManifest(base_url="/w")), "manifest.fallback.files"),
        (
            weights_pb2.WeightManifest(tensors=weights_pb2.TensorsManifest(files=bad_files("/a.safetensors"))),
            "manifest.tensors.files.files[0].name",
        ),
        (
            weights_pb2.WeightManifest(tensors=weights_pb2.TensorsManifest(files=bad_files("model.bin"))),
            "manifest.tensors.files.files[0].name",
        ),
        (
            weights_pb2.WeightManifest(tensors=weights_pb2.TensorsManifest(files=bad_files("config.json"))),
            "manifest.tensors.files.files",
        ),
        (weights_pb2.WeightManifest(tensors=weights_pb2.TensorsManifest()), "manifest.tensors.files.base_url"),
        (patched(name="../a"), "manifest.files.files[0].patches[0].name"),
        (patched(name=FILES.files[0].name), "manifest.files.files[0].patches[0].name"),
        (patched(sha256=b"x"), "manifest.files.files[0].patches[0].sha256"),
        (patched(base_sha256=b"x"), "manifest.files.files[0].patches[0].base_sha256"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_manifest_names_its_field(rpc: Rpc, bad: weights_pb2.WeightManifest, field: str) -> None:
    run = rpc.create()
    error = failure(lambda: run.publish(1, manifest=bad))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", field)


# ── engines ──────────────────────────────────────────────────────────────────


def test_a_run_shows_all_that_an_engine_reports(rpc: Rpc) -> None:
    run = rpc.create()
    prepared = common_pb2.WeightVersion(term=1, version=4)
    came_from = "http://relay:8090 16.0 MB at 12.0 MB/s"
    samples = {name: number for number, name in enumerate(ENGINE_SAMPLES, 1)} | {"takes_buckets": True}
    run.report(
        "e",
        membership=(1 << 53) - 1,
        prepared=prepared,
        weights_url="http://worker:9000/weights",
        weights_from=came_from,
        **samples,  # type: ignore[arg-type]
    )
    (engine,) = run.get().engines
    assert engine.weights_from == came_from
    assert {name: getattr(engine, name) for name in samples} == samples
    assert (engine.membership, engine.prepared, engine.weights_url) == (
        (1 << 53) - 1,
        prepared,
        "http://worker:9000/weights",
    )
    run.report("e", silent_ms=5_000_000)
    (engine,) = run.get().engines
    assert (engine.membership, engine.HasField("prepared"), engine.weights_url) == (0, False, "")
    assert not engine.weights_from
    assert not any(getattr(engine, name) for name in samples)
    assert engine.silent_ms < 60_000


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prepared": common_pb2.WeightVersion()}, "report.prepared.term"),
        ({"weights_url": "worker:9000"}, "report.weights_url"),
        ({"weights_url": "http://" + "w" * 250}, "report.weights_url"),
        ({"weights_from": "w" * 513}, "report.weights_from"),
    ],
)
def test_a_bad_report_names_its_field(rpc: Rpc, fields: dict[str, Any], field: str) -> None:
    run = rpc.create()
    error = failure(lambda: run.report("e", **fields))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", field)
    assert not run.get().engines


def test_every_engine_may_load_where_the_policy_has_no_limit(rpc: Rpc) -> None:
    run = rpc.create()
    assert run.get().policy.max_unavailable_engines == 0
    assert all(run.report(f"e{i}", wants_load=True).may_load for i in range(3))
    assert run.report("e0").may_load


def test_a_place_that_is_given_back_is_told_to_the_watches_of_those_who_wait(rpc: Rpc) -> None:
    run = rpc.create(max_unavailable_engines=1)
    assert run.report("a", wants_load=True).may_load
    assert not run.report("b", wants_load=True).may_load
    watch = run.watch()
    before = next(watch)
    run.report("a", weights_pb2.ENGINE_STATE_READY)
    assert next(watch).published == before.published
    assert run.report("b", wants_load=True).may_load
    watch.cancel()


def test_a_policy_that_allows_more_engines_is_told_to_those_who_wait(rpc: Rpc) -> None:
    run = rpc.create(max_unavailable_engines=1)
    run.report("a", wants_load=True)
    watch = run.watch()
    next(watch)
    run.update_policy(max_unavailable_engines=2)
    next(watch)
    assert run.report("b", wants_load=True).may_load
    watch.cancel()
