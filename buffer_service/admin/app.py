"""The admin page's routes: the page itself, its data, probes and metrics.

All data is read from the store, or asked of the supervisor, when it is requested.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from buffer_service import commands
from buffer_service.admin import rollouts
from buffer_service.admin.event_stream import EventStream
from buffer_service.admin.feeds import Feeds
from buffer_service.admin.metrics.scrape import scrape
from buffer_service.admin.page_files import PageFiles
from buffer_service.admin.reading import READ_S, RunReader, read_run
from buffer_service.admin.run_values import in_short, whole
from buffer_service.domain.ports import RunStore
from buffer_service.observability.shared_values import SharedMetrics
from buffer_service.security.gate import caller
from buffer_service.security.roles import PAGE_FILES
from buffer_wire.errors import (
    AccessRefused,
    InvalidField,
    InvalidRequest,
    NotReady,
    ReplayGap,
    RolloutBufferError,
    StepAhead,
    StoreFault,
    UnknownGroup,
    UnknownRun,
)
from buffer_wire.limits import RUN_ID

STORE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the service that the page does not read from the store."""

    address: str
    store: str
    metrics: SharedMetrics
    not_ready_because: Callable[[], str]
    """Function for the reason why the service is not ready; empty when the rpc processes serve."""
    collectors: Sequence[Collector] = ()
    """Metrics of the process itself."""


class AdminPage:
    """Handlers over one store."""

    def __init__(self, store: RunStore, facts: Facts) -> None:
        self._store = store
        self._facts = facts
        self._files = PageFiles()
        self._reader = RunReader(store)
        self.feeds = Feeds(store)

    def app(self) -> Starlette:
        """The ASGI application."""
        app = Starlette(
            routes=[
                Route("/", self._files.index),
                Route(f"{PAGE_FILES}{{name}}", self._files.file),
                Route("/livez", self.livez),
                Route("/readyz", self.readyz),
                Route("/metrics", self.metrics),
                Route("/api", self.index),
                Route("/api/events", self.events),
                Route("/api/runs", self.runs),
                Route("/api/runs/{run_id}", self.run),
                Route("/api/runs/{run_id}/groups", self.groups),
                Route("/api/runs/{run_id}/groups/{task_id}/{incarnation}", self.sample),
            ],
            exception_handlers={RolloutBufferError: _error},
        )
        # A redirect would lead to whatever host the request names.
        app.router.redirect_slashes = False
        return app

    async def index(self, _: Request) -> Response:
        """Answer with the service's address, its store, the caller's runs, and links."""
        return JSONResponse(
            {
                "service": "rollout-buffer",
                "address": self._facts.address,
                "store": self._facts.store,
                "runs": [f"/api/runs/{run_id}" for run_id in caller().visible(await self._store.list_runs())],
                "links": ["/", "/api/runs", "/api/events", "/metrics", "/livez", "/readyz"],
            }
        )

    async def livez(self, _: Request) -> Response:
        """200 while this process answers."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """200 while the store answers and every rpc process serves; otherwise 503 with the reasons."""
        reasons = [reason for reason in (self._facts.not_ready_because(), await self._store_silent_because()) if reason]
        return PlainTextResponse("\n".join([*(reasons or ["ok"]), ""]), 503 if reasons else 200)

    async def metrics(self, _: Request) -> Response:
        """Runs from the store, RPCs from the memory of the rpc processes."""
        body = await scrape(self._store, self._reader, self._facts.metrics, self._facts.collectors)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    async def runs(self, _: Request) -> Response:
        """Answer with a summary of each run that can be read."""
        runs = await self._reader.read(
            lambda run_id: self._store.call(commands.view(run_id)), asyncio.get_running_loop().time() + READ_S
        )
        return JSONResponse([in_short(view) for view in runs.found])

    async def run(self, request: Request) -> Response:
        """Answer with the whole state of one run."""
        view, evaluations = await read_run(self._store, _run_id(request.path_params["run_id"]))
        return JSONResponse(whole(view, evaluations))

    async def groups(self, request: Request) -> Response:
        """Answer with groups of the queue, or of a step: `?step=N`."""
        run_id = _run_id(request.path_params["run_id"])
        return JSONResponse(await rollouts.groups(self._store, run_id, request.query_params.get("step")))

    async def sample(self, request: Request) -> Response:
        """Answer with a group, and the tokens of one of its samples: `?sample=N`."""
        at = request.path_params
        group_id, index = f"{at['task_id']}/{at['incarnation']}", request.query_params.get("sample", "0")
        return JSONResponse(await rollouts.sample(self._store, _run_id(at["run_id"]), group_id, index))

    async def events(self, request: Request) -> EventStream:
        """Stream the changes of one run: `?run=NAME`. Raises InvalidField."""
        # Here, where the run is known as it will be read, and not at the door.
        run_id = request.query_params.get("run", "")
        if not run_id:
            raise InvalidField("run", run_id, "the name of a run: /api/events?run=NAME")
        caller().check_run(run_id)
        _run_id(run_id)
        return EventStream(self.feeds, run_id, caller(), request.headers.get("last-event-id", ""))

    async def _store_silent_because(self) -> str:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._store.list_runs()
        except StoreFault as error:
            return error.message
        except TimeoutError:
            return f"the store did not answer within {STORE_TIMEOUT_S:.0f} s"
        return ""


def _run_id(name: str) -> str:
    """The name, where it can be a run's: others would be keys of the store that nobody thought of."""
    if not RUN_ID.fullmatch(name):
        raise UnknownRun(name[:64])
    return name


async def _error(_: Request, error: Exception) -> Response:
    status, reason, message = 500, "internal", str(error)
    if isinstance(error, RolloutBufferError):
        reason, message = error.reason, error.message
    if isinstance(error, AccessRefused):
        status = 403
    elif isinstance(error, (ReplayGap, StepAhead, UnknownGroup, UnknownRun)):
        status = 404
    elif isinstance(error, InvalidRequest):
        status = 400
    elif isinstance(error, (StoreFault, NotReady)):
        status = 503
    return JSONResponse({"reason": reason, "message": message}, status)
