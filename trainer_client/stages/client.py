"""Calls of a stage's worker: leases of groups, their payloads, and what is pushed for them."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import grpc

from buffer_wire.codec import Delivered, join_group, stored_group
from buffer_wire.connection.retry import Retry, rpc_error
from buffer_wire.payloads.keys import part_count
from buffer_wire.payloads.parts import NewPayload
from buffer_wire.payloads.reader import PayloadReader, PayloadsUnreadable
from buffer_wire.payloads.relayed import WRITE_METHOD, written_messages
from buffer_wire.resp.encoding import flat
from rollout_buffer.v1 import groups_pb2, payloads_pb2, stages_pb2, tasks_pb2
from trainer_client.batch import Group
from trainer_client.client import requests
from trainer_client.client.call import Call
from trainer_client.client.driver import ClientOptions, worth_repeating
from trainer_client.client.operations import ServiceClient
from trainer_client.forks import CALLS

LEASE_WAIT_S = 5.0
"""Longest wait of one request for groups at the service."""
_TASKS = "/rollout_buffer.v1.TaskService"


class StageClient(ServiceClient):
    """Client of one worker of a stage. `instance_id` is that of its process."""

    def __init__(
        self, target: str, run_id: str, stage: str, worker_id: str, options: ClientOptions | None = None
    ) -> None:
        super().__init__(target, options)
        self.run_id = run_id
        self.stage = stage
        self.worker_id = worker_id
        self.instance_id = requests.new_request_id()
        who = f"stage {stage} {worker_id}"
        self._payloads = PayloadReader(
            run_id, who, lambda trouble: self._call(requests.read_access(run_id, who, trouble))
        )

    def close(self) -> None:
        """Close the connections."""
        self._payloads.close()
        super().close()

    def lease_groups(self, most: int) -> stages_pb2.LeaseGroupsResponse:
        """Lease up to `most` groups; waits some seconds for the first. Raises RolloutBufferError."""
        request_id = requests.new_request_id()
        return self._call(
            Call(
                "/rollout_buffer.v1.StageService/LeaseGroups",
                self.run_id,
                f"leasing groups of stage {self.stage}",
                lambda ref: stages_pb2.LeaseGroupsRequest(
                    run=ref,
                    stage=self.stage,
                    worker_id=self.worker_id,
                    instance_id=self.instance_id,
                    request_id=request_id,
                    max_groups=most,
                    wait_ms=round(LEASE_WAIT_S * 1000),
                ),
                stages_pb2.LeaseGroupsResponse,
                lambda reply: reply,
            )
        )

    def extend(self, lease_ids: Sequence[str], timeout_s: float) -> list[bool]:
        """Prolong leases: whether each is live. Raises RolloutBufferError."""
        reply = self._call(
            Call(
                f"{_TASKS}/ExtendLeases",
                self.run_id,
                "prolonging leases",
                lambda ref: tasks_pb2.ExtendLeasesRequest(
                    run=ref, worker_id=self.worker_id, instance_id=self.instance_id, lease_ids=lease_ids
                ),
                tasks_pb2.ExtendLeasesResponse,
                lambda reply: reply,
                timeout_s,
            )
        )
        return [state == tasks_pb2.LEASE_STATE_LIVE for state in reply.states]

    def give_back(self, lease_ids: Sequence[str], error: str = "") -> None:
        """Hand leases back, as interrupted or with an error, which counts. Raises RolloutBufferError."""
        kind = tasks_pb2.RETURN_KIND_FAILED if error else tasks_pb2.RETURN_KIND_INTERRUPTED
        returns = [tasks_pb2.LeaseReturn(lease_id=one, kind=kind, error=error[:2000]) for one in lease_ids]
        self._call(
            Call(
                f"{_TASKS}/ReturnLeases",
                self.run_id,
                "returning leases",
                lambda ref: tasks_pb2.ReturnLeasesRequest(
                    run=ref, worker_id=self.worker_id, instance_id=self.instance_id, returns=returns
                ),
                tasks_pb2.ReturnLeasesResponse,
                lambda reply: reply,
            )
        )

    def read(self, lease: stages_pb2.StageLease, published: int) -> Group:
        """Read a leased group with what earlier stages have added. Raises NotReady where it is gone."""
        keys = [lease.payload_key, *(added.payload_key for added in lease.added)]
        bodies = self._read(keys)
        versions = lease.head_version, lease.tail_version
        group = Delivered(bodies[0], lease.sequence, *versions)
        stages = [
            Delivered(body, lease.sequence, *versions, stage=added.stage)
            for body, added in zip(bodies[1:], lease.added, strict=True)
        ]
        return Group.of(group, published, stages)

    def _read(self, keys: Sequence[str]) -> Sequence[memoryview]:
        if self.options.direct_payloads and self._payloads.open():
            with suppress(PayloadsUnreadable):
                return self._payloads.read(keys)
        return [self._read_parts(self.run_id, key) for key in keys]

    def push(self, header: bytes, payload: bytes) -> groups_pb2.PushAck:
        """Push what was made for a lease. A repeat changes nothing. Raises RolloutBufferError."""
        if not part_count(len(header) + len(payload)):
            body = b"".join(join_group(header, payload))
        else:
            body = stored_group(header, self._written(header, payload))
        group = groups_pb2.Group.FromString(body)
        return self._call(
            Call(
                "/rollout_buffer.v1.GroupService/PushGroup",
                self.run_id,
                "pushing columns",
                lambda ref: groups_pb2.PushGroupRequest(run=ref, group=group),
                groups_pb2.PushGroupResponse,
                lambda reply: reply.ack,
            )
        )

    def _written(self, header: bytes, payload: bytes) -> groups_pb2.StoredPayload:
        """Have the service write a large payload in parts."""

        def attempt() -> groups_pb2.StoredPayload:
            # A key is never used again: parts of it may be there.
            new = NewPayload.of(self.run_id, header, [flat(payload)], in_parts=True)
            write = self._bulk.stream_unary(WRITE_METHOD, None, payloads_pb2.WritePayloadResponse.FromString)
            with CALLS.under_way():
                try:
                    write(
                        written_messages(self.revisions.ref(self.run_id), new), timeout=self.options.transfer_timeout_s
                    )
                except grpc.RpcError as raised:
                    raise rpc_error(raised) from raised
            return new.stored

        return Retry(
            deadline_s=self.options.timeout_s,
            waiting_on=f"the service at {self.target}",
            retry_on=worth_repeating,
            tokens=self.tokens,
            mend=partial(self.revisions.met, self.run_id),
        ).blocking(attempt)
