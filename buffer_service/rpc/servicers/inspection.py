"""The RPCs of looks into a run: parse, call the store, encode. Errors are translated by the interceptor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from buffer_service import commands
from buffer_service.domain.inspection import Position, TaskSet
from buffer_service.domain.ports import RunStore
from buffer_service.rpc.convert import fields
from buffer_service.rpc.convert import inspection as convert
from buffer_service.rpc.convert.page_tokens import Shape, position, to_token
from buffer_service.stored_groups import StoredGroup, find_group
from buffer_wire.messages import message_of
from buffer_wire.payloads.keys import size_of
from rollout_buffer.v1 import groups_pb2, inspect_pb2_grpc
from rollout_buffer.v1 import inspect_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

_IN_ORDER: Shape = (0,)
_IN_STEP: Shape = (0, 0, 0, 0, -1)
_TASK_POSITIONS: Mapping[TaskSet, Shape] = {
    TaskSet.PENDING: (0, None, -(1 << 10), 0),
    TaskSet.LEASED: (None,),
    TaskSet.ENDED: _IN_ORDER,
}
"""Positions as the scripts inspect_*.lua give them."""


@dataclass(frozen=True, slots=True)
class InspectServicer(inspect_pb2_grpc.InspectServiceServicer):
    """Servicer that lists tasks, groups and steps, looks up single ones, and tells who waits on whom."""

    store: RunStore

    async def ListTasks(self, request: pb.ListTasksRequest, _: Context) -> pb.ListTasksResponse:
        """A page of tasks."""
        run_id, which = fields.run_id(request.run.run_id), convert.task_set(request)
        environment = convert.environment(request)
        worker_id, limit = convert.worker_id(request.worker_id), convert.page_size(request.page_size)
        scope: Position = ("tasks", which.value, worker_id, *_filter(environment))
        after = position(request.page_token, scope, _TASK_POSITIONS[which])
        page = await self.store.call(
            commands.list_tasks(run_id, which, after, limit, environment=environment, worker_id=worker_id)
        )
        tasks = [convert.to_task(task) for task in page.items]
        return message_of(pb.ListTasksResponse, page, tasks=tasks, next_page_token=to_token(scope, page.following))

    async def GetTask(self, request: pb.GetTaskRequest, _: Context) -> pb.GetTaskResponse:
        """Look up one task."""
        run_id, task_id = fields.run_id(request.run.run_id), convert.task_id(request.task_id)
        revision, now_ms, task = await self.store.call(commands.task(run_id, task_id))
        return pb.GetTaskResponse(revision=revision, now_ms=now_ms, task=convert.to_task(task))

    async def ListGroups(self, request: pb.ListGroupsRequest, _: Context) -> pb.ListGroupsResponse:
        """A page of the queue, or of a step."""
        run_id, step = fields.run_id(request.run.run_id), convert.step_of(request)
        environment = convert.environment(request)
        limit = convert.page_size(request.page_size)
        scope: Position = ("groups", -1 if step is None else step, *_filter(environment))
        after = position(request.page_token, scope, _IN_ORDER if step is None else _IN_STEP)
        place, page = await self.store.call(commands.list_groups(run_id, step, after, limit, environment=environment))
        groups = [convert.to_group(group, place) for group in page.items]
        return message_of(pb.ListGroupsResponse, page, groups=groups, next_page_token=to_token(scope, page.following))

    async def GetGroup(self, request: pb.GetGroupRequest, _: Context) -> pb.GetGroupResponse:
        """Look up a group that is stored."""
        run_id, count = fields.run_id(request.run.run_id), convert.max_tokens(request.max_tokens)
        revision, now_ms, task, group = await find_group(self.store, run_id, request.group_id)
        reply = pb.GetGroupResponse(
            revision=revision,
            now_ms=now_ms,
            task=convert.to_task(task),
            header=_shown(group, samples=request.include_samples),
            bytes=size_of(task.body_key),
            samples=len(group.header.samples),
        )
        if request.HasField("tokens_of_sample"):
            part = (request.tokens_of_sample, request.first_token, count)
            reply.token_ids.extend(await group.token_ids(self.store, *part))
            reply.loss_mask = await group.loss_mask(self.store, *part)
        return reply

    async def ListBatches(self, request: pb.ListBatchesRequest, _: Context) -> pb.ListBatchesResponse:
        """A page of steps."""
        run_id, limit = fields.run_id(request.run.run_id), convert.page_size(request.page_size)
        scope: Position = ("steps",)
        page = await self.store.call(commands.list_steps(run_id, position(request.page_token, scope, _IN_ORDER), limit))
        steps = [convert.to_step(step) for step in page.items]
        return message_of(pb.ListBatchesResponse, page, steps=steps, next_page_token=to_token(scope, page.following))

    async def GetWaits(self, request: pb.GetWaitsRequest, _: Context) -> pb.GetWaitsResponse:
        """Tell who waits on whom."""
        run_id, limit = fields.run_id(request.run.run_id), convert.named(request.limit)
        return convert.to_waits(await self.store.waits(run_id, limit))


def _filter(environment: str | None) -> tuple[str, ...]:
    return () if environment is None else (environment,)


def _shown(group: StoredGroup, *, samples: bool) -> groups_pb2.GroupHeader:
    """Header as it is sent: without the task's metadata, which may be a quarter of a megabyte."""
    header = groups_pb2.GroupHeader()
    header.CopyFrom(group.header)
    header.ClearField("metadata_json")
    if not samples:
        header.ClearField("samples")
        header.ClearField("columns")
    return header
