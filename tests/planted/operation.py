"""Operation CountPayloads: how many payloads of a run are staged, and how many are to be deleted."""

from tests.planted.change import Change, Edit

CHANGE = Change(
    name="operation",
    title="a new operation of the store",
    most_files=9,
    edits=(
        Edit(
            "proto/rollout_buffer/v1/runs.proto",
            at="  rpc ContinueRun(ContinueRunRequest) returns (ContinueRunResponse);\n",
            put="""\
  // Counts the payloads of a run that are in no queue and no step.
  rpc CountPayloads(CountPayloadsRequest) returns (CountPayloadsResponse);
""",
        ),
        Edit(
            "proto/rollout_buffer/v1/runs.proto",
            at="// Request of DeleteRun.\n",
            where="before",
            put="""\
// Request of CountPayloads.
message CountPayloadsRequest {
  // The run.
  RunRef run = 1;
}

// Reply of CountPayloads.
message CountPayloadsResponse {
  // The run's revision.
  uint64 revision = 1;
  // Proof that the service gave this revision out.
  string revision_proof = 2;
  // Payloads that are stored and not judged yet.
  uint64 staged = 3;
  // Payloads that are to be deleted.
  uint64 trash = 4;
}

""",
        ),
        Edit(
            "buffer_service/store/lua/inspection/count_payloads.lua",
            put="""\
-- Counts the payloads of a run that are staged, and those that are to be deleted. Writes nothing.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'counted', revision, staged, trash} | {'error', 'unknown_run'}
-- Complexity O(1)

-- @include run

local ctx = Run.context()
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local revision = Run.signed(ctx, ctx.state.revision)
return reply('counted', revision, call('ZCARD', key('staging')), call('SCARD', key('trash')))
""",
        ),
        Edit(
            "buffer_service/commands/runs.py",
            at="def delete_portion(",
            where="before",
            put='''\
def count_payloads(run_id: str) -> Command[tuple[Revision, int, int]]:
    """Count the payloads that are in no queue and no step: revision, those staged, those to be deleted."""
    return Command(run_id, "count_payloads", pack(), lambda _, fields: (fields[0], fields[1], fields[2]), reads=True)


''',
        ),
        Edit(
            "buffer_service/commands/__init__.py",
            at="from buffer_service.commands.runs import continue_run, ",
            put="count_payloads, ",
        ),
        Edit("buffer_service/commands/__init__.py", at='    "continue_run",\n', put='    "count_payloads",\n'),
        Edit(
            "buffer_service/rpc/servicers/loop.py",
            at="    async def DeleteRun(self",
            where="before",
            put='''\
    async def CountPayloads(self, request: runs_pb2.CountPayloadsRequest, _: Context) -> runs_pb2.CountPayloadsResponse:
        """Count payloads that are in no queue and no step."""
        run_id = fields.run_id(request.run.run_id)
        revision, staged, trash = await self.store.call(commands.count_payloads(run_id))
        return runs_pb2.CountPayloadsResponse(
            revision=revision, revision_proof=revision.proof, staged=staged, trash=trash
        )

''',
        ),
        Edit(
            "buffer_service/security/roles.py",
            at='        "ContinueRun": _TRAINER,\n',
            put='        "CountPayloads": _READ,\n',
        ),
        Edit(
            "trainer_client/client/requests.py",
            at="def delete_run(",
            where="before",
            put='''\
def count_payloads(run_id: str) -> Call[runs_pb2.CountPayloadsResponse, tuple[int, int]]:
    """Count the payloads of a run that are staged, and those that are to be deleted. Raises UnknownRun."""
    return Call(
        "/rollout_buffer.v1.RunService/CountPayloads",
        run_id,
        f"counting payloads of run {run_id!r}",
        lambda ref: runs_pb2.CountPayloadsRequest(run=ref),
        runs_pb2.CountPayloadsResponse,
        lambda reply: (reply.staged, reply.trash),
    )


''',
        ),
        *(
            Edit(
                f"trainer_client/client/{module}.py",
                at="    delete_run = operation(requests.delete_run)\n",
                put="    count_payloads = operation(requests.count_payloads)\n",
            )
            for module in ("operations", "aio")
        ),
        Edit(
            "docs/security.md",
            at="| `RunService.ContinueRun` | – | yes | – | yes |\n",
            put="| `RunService.CountPayloads` | – | yes | yes | yes |\n",
        ),
    ),
    tests=(
        "tests/security/test_authorization.py::test_the_page_of_roles_says_what_the_table_says",
        "tests/store/test_scripts.py",
    ),
)
