"""Field `engine_calls` of a sample: calls of an engine that its response took, from the worker to the trainer."""

from tests.planted.change import Change, Edit

CHANGE = Change(
    name="sample_field",
    title="a field on a sample",
    most_files=4,
    not_in="buffer_service/",
    edits=(
        Edit(
            "proto/rollout_buffer/v1/groups.proto",
            at="  // Turns in order; optional.\n  repeated Turn turns = 7;\n",
            put="  // Calls of an engine that the response took, at most 4,194,304.\n  uint32 engine_calls = 11;\n",
        ),
        Edit(
            "buffer_wire/validate.py",
            at="            or its_turns\n",
            where="before",
            put="            or sample.engine_calls > limits.MAX_TOKENS\n",
        ),
        Edit(
            "buffer_wire/validate.py",
            at="    if not isfinite(sample.reward):\n",
            where="before",
            put="""\
    if sample.engine_calls > limits.MAX_TOKENS:
        raise InvalidField(f"samples[{i}].engine_calls", sample.engine_calls, f"at most {limits.MAX_TOKENS}")
""",
        ),
        Edit(
            "rollout_workers/generation/sample.py",
            at="    columns: dict[str, EngineColumn] = field(default_factory=dict)\n",
            where="before",
            put="    engine_calls: int = 0\n",
        ),
        Edit(
            "rollout_workers/generation/sample.py",
            at='        self.finish = None if new.finish_reason == "abort" else new.finish_reason\n',
            put="        self.engine_calls += 1\n",
        ),
        Edit(
            "rollout_workers/generation/sample.py",
            at='    wire.finish_reason = _WIRE_FINISH.get(sample.finish or "", groups_pb2.FINISH_REASON_ABORTED)\n',
            put="    wire.engine_calls = sample.engine_calls\n",
        ),
        Edit(
            "rollout_workers/generation/sample.py",
            at="        finish=_FINISH.get(wire.finish_reason),\n",
            put="        engine_calls=wire.engine_calls,\n",
        ),
        Edit(
            "trainer_client/batch.py",
            at="    spans: tuple[VersionSpan, ...]\n",
            where="before",
            put="    engine_calls: int\n",
        ),
        Edit(
            "trainer_client/batch.py",
            at='        finish_reason=_FINISH.get(sample.finish_reason, "unspecified"),\n',
            put="        engine_calls=sample.engine_calls,\n",
        ),
    ),
    tests=("tests/wire/test_validate.py", "tests/workers/test_samples.py"),
)
