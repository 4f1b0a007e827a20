"""AsyncBatchGenerator of verifiers, with the generation done by the run's workers.

Contract followed: verifiers 0.1.2 to 0.1.6, methods, defaults, limits and errors, with these differences:

- several batches are generated at once: a later one can be ready first, and `generation_time` counts from the submit;
- a failed generation raises RuntimeError from `get_batch`, as its documentation says; there the thread died and callers
  met TimeoutError;
- a task whose attempt failed is tried again with exponential back-off, by the service (`max_attempts`,
  `retry_backoff_ms` of the policy), and so is every call to the service;
- weights are published with `publish`, and engines reload while they generate; nobody waits for `is_generating`;
- `evaluate` is missing: use `BufferClient.evaluate`.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from trainer_client.aio import AsyncBufferClient
from trainer_client.client import BufferClient
from trainer_client.integrations.verifiers_collector import BufferConfig, Collector, OpenRequest, Outcome
from trainer_client.integrations.verifiers_requests import BatchRequest, sampling_of
from trainer_client.integrations.verifiers_results import BatchResult, result_of
from trainer_client.manifest import Manifest
from trainer_client.publication import Publication, WeightSource
from trainer_client.publishing import Asked, manifest_for, published_beyond
from trainer_client.state import Resumed

JOIN_S = 10.0
_POLL_S = 0.1
"""How soon a waiting `get_batch` sees that the thread has ended."""

_Ready: TypeAlias = "BatchResult | Exception"


class AsyncBatchGenerator:
    """Generates batches ahead of training.

    `env`: kept for the trainer, not used; rollouts and rewards are the workers', `rollout-buffer worker --environment
    verifiers:NAME` or any other. `client_config`: a `BufferConfig`, or a mapping with its fields: "base_url", "run_id",
    "policy", "publisher", "options". `model_name`: kept, not used. `sampling_args`: as for an OpenAI client.
    `num_batches_ahead`: what `should_submit_more` goes by; 0 is synchronous. `max_queue_size`: most batches that are
    submitted and not yet collected; None or 0: twice num_batches_ahead, at least 4. `generation_timeout`: seconds.

    Raises InvalidField for sampling parameters that the workers do not know.
    """

    def __init__(
        self,
        env: Any,  # noqa: ANN401 - any environment
        client_config: BufferConfig | Mapping[str, Any],
        model_name: str,
        sampling_args: Mapping[str, Any],
        num_batches_ahead: int = 1,
        max_queue_size: int | None = None,
        generation_timeout: float = 300.0,
    ) -> None:
        self.env = env
        self.client_config = BufferConfig.of(client_config)
        self.model_name = model_name
        self.sampling_args = sampling_args
        self.num_batches_ahead = num_batches_ahead
        self.max_queue_size = max_queue_size or max(num_batches_ahead * 2, 4)
        self.generation_timeout = generation_timeout
        self.pending_batches: set[int] = set()
        """Submitted, and not seen to be complete by a `get_batch` yet."""
        self.completed_batches: dict[int, _Ready] = {}
        """Seen by a `get_batch` that asked for another one."""
        self.generation_times: deque[float] = deque(maxlen=100)
        self.started = False
        self.worker_thread: threading.Thread | None = None
        self._sampling = sampling_of(sampling_args)
        self._arrived: queue.Queue[tuple[int, _Ready]] = queue.Queue()
        self._open: dict[int, OpenRequest] = {}
        """Ended and not handed out, by batch id."""
        self._handed_out: list[OpenRequest] = []
        self._failure: BaseException | None = None
        """What ended the thread."""
        self._lock = threading.Lock()
        self._collector = Collector(self.client_config, self._sampling, self._take_over)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._publishing: BufferClient | None = None
        self._epoch = 0
        self._version = 0
        """Published, as far as this process knows."""
        self._asked = Asked()
        self._begun = threading.Event()
        """The run was taken over, or the thread has ended."""

    # ── its life ─────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the thread, which takes the run over; more calls do nothing. Raises RuntimeError after `stop`."""
        if self.started:
            return
        if self._loop is not None:
            raise RuntimeError("AsyncBatchGenerator was stopped; make a new one")
        self._loop = asyncio.new_event_loop()
        self.worker_thread = threading.Thread(target=self._work, daemon=True, name="AsyncBatchGenerator")
        self._main = self._loop.create_task(self._generate())
        self.worker_thread.start()
        self.started = True

    def stop(self) -> None:
        """End the thread; the run stays as it is. More calls do nothing."""
        if not self.started:
            return
        self._call_soon(self._cancel)
        if self.worker_thread is not None:
            self.worker_thread.join(timeout=JOIN_S)
        if self._publishing is not None:
            self._publishing.close()
        self.started = False

    @property
    def is_generating(self) -> bool:
        """True while the workers have something to do for this generator."""
        with self._lock:
            return len(self.pending_batches) > self._arrived.qsize()

    # ── batches ──────────────────────────────────────────────────────────────

    def submit_batch(self, request: BatchRequest) -> bool:
        """Have a batch generated; False when the queue is full, True when it is under way, also from before.

        Returns at once; what is wrong with the request comes up in `get_batch`. Raises RuntimeError before `start`.
        """
        if not self.started:
            raise RuntimeError("AsyncBatchGenerator not started")
        with self._lock:
            if request.batch_id in self.pending_batches or request.batch_id in self.completed_batches:
                return True
            if len(self.pending_batches) >= self.max_queue_size:
                return False
            self.pending_batches.add(request.batch_id)
        submitted = OpenRequest(request, self._done)
        self._call_soon(lambda: self._collector.submit(submitted))
        return True

    def get_batch(self, batch_id: int, timeout: float | None = None) -> BatchResult:
        """Wait for a batch, in any order; the batches that were handed out before count as trained.

        `timeout`: seconds; None or 0: generation_timeout. Raises TimeoutError; RuntimeError when the generation of this
        batch, or all generation, has failed.
        """
        timeout = timeout or self.generation_timeout
        deadline = time.monotonic() + timeout
        self._mark_trained()
        while True:
            with self._lock:
                ready = self.completed_batches.pop(batch_id, None)
            if ready is not None:
                return self._hand_out(batch_id, ready)
            try:
                arrived, outcome = self._arrived.get(timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))
            except queue.Empty:
                if self._failure is not None and self._arrived.empty():
                    error = f"Batch {batch_id} generation failed: {self._failure}"
                    raise RuntimeError(error) from self._failure
                if time.monotonic() >= deadline:
                    raise TimeoutError(self._late(batch_id, timeout)) from None
                continue
            with self._lock:
                self.pending_batches.discard(arrived)
                self.completed_batches[arrived] = outcome

    def get_pending_count(self) -> int:
        """Batches that were submitted and that no `get_batch` has seen complete."""
        with self._lock:
            return len(self.pending_batches)

    def get_completed_count(self) -> int:
        """Batches that a `get_batch` has seen complete while it waited for another one."""
        with self._lock:
            return len(self.completed_batches)

    def get_average_generation_time(self) -> float:
        """Mean seconds of the latest 100 batches; 0.0 before the first."""
        times = tuple(self.generation_times)
        return sum(times) / len(times) if times else 0.0

    def should_submit_more(self) -> bool:
        """True while fewer than num_batches_ahead batches are pending or complete."""
        with self._lock:
            return len(self.pending_batches) + len(self.completed_batches) < self.num_batches_ahead

    # ── weights ──────────────────────────────────────────────────────────────

    def publish(self, source: WeightSource = None) -> int:
        """Offer weights trained on every batch handed out so far, and commit those. Returns the new version.

        `source`: what the config's publisher takes, a directory that engines can read, a manifest, or None for engines
        that need not load. Raises RuntimeError before `start`; VersionConflict, StaleEpoch, what the publisher does.
        """
        if not self.started:
            raise RuntimeError("AsyncBatchGenerator not started")
        config, progress = self.client_config, self._collector.progress
        if not self._begun.wait(config.options.timeout_s) or self._failure is not None:
            where = f"run {config.run_id!r} of {config.base_url}"
            raise RuntimeError(f"{where} is not held by this generator: {self._failure}") from self._failure
        with self._lock:
            trained, self._handed_out = self._handed_out, []
        progress.trained(trained)
        if self._publishing is None:
            self._publishing = BufferClient(config.base_url, config.options)
        known = Publication(self._publishing, config.run_id, self._epoch, self._version)
        publication = replace(known, version=published_beyond(known, self._asked, self._offered) + 1)
        manifest = manifest_for(source, config.publisher, publication)
        through, self._asked = progress.uncommitted(), Asked(publication.version, manifest, answered=False)
        done = self._publishing.publish(
            config.run_id,
            epoch=publication.epoch,
            version=publication.version,
            manifest=manifest,
            commit_through=through,
        )
        self._version = publication.version
        if through is not None:
            progress.committed(through)
        self._offered(manifest, done.committed_steps)
        self._asked = Asked(publication.version)
        return publication.version

    # ── inside ───────────────────────────────────────────────────────────────

    def _offered(self, manifest: Manifest | None, committed_steps: int) -> None:
        """The service offers `manifest` now."""
        publisher = self.client_config.publisher
        if publisher is not None and manifest is not None:
            publisher.published(manifest, committed_steps=committed_steps)
            publisher.checkpointed(committed_steps)

    def _work(self) -> None:
        assert self._loop is not None  # noqa: S101 - for mypy; start has set both
        assert self._main is not None  # noqa: S101
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            self._failure = RuntimeError("AsyncBatchGenerator was stopped")
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, whatever it is
            self._failure = error
        finally:
            self._loop.close()
            self._begun.set()

    async def _generate(self) -> None:
        async with AsyncBufferClient(self.client_config.base_url, self.client_config.options) as client:
            await self._collector.run(client)

    def _take_over(self, start: Resumed) -> None:
        self._epoch, self._version = start.epoch, start.version
        self._begun.set()

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()

    def _call_soon(self, function: Callable[[], object]) -> None:
        # After a failure the loop is closed: get_batch says so.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _done(self, submitted: OpenRequest, outcome: Outcome) -> None:
        """On the loop: a request has ended."""
        taken_s = time.monotonic() - submitted.submitted_s
        ready: _Ready
        if isinstance(outcome, Exception):
            ready = outcome
        else:
            try:
                ready = result_of(submitted.request, submitted.plans, outcome, taken_s)
            except Exception as error:  # noqa: BLE001 - a tokenizer's; raised in get_batch
                ready = error
            self.generation_times.append(taken_s)
        with self._lock:
            self._open[submitted.request.batch_id] = submitted
        self._arrived.put((submitted.request.batch_id, ready))

    def _hand_out(self, batch_id: int, ready: _Ready) -> BatchResult:
        with self._lock:
            self._handed_out.append(self._open.pop(batch_id))
        if isinstance(ready, Exception):
            raise RuntimeError(f"Batch {batch_id} generation failed: {ready}") from ready  # noqa: TRY004 - verifiers'
        return ready

    def _mark_trained(self) -> None:
        with self._lock:
            trained, self._handed_out = self._handed_out, []
        if trained:
            self._call_soon(lambda: self._collector.trained(trained))

    def _late(self, batch_id: int, timeout: float) -> str:
        waits = "its tasks are at the workers" if batch_id in self.pending_batches else "nobody submitted it"
        where = f"run {self.client_config.run_id!r} of {self.client_config.base_url}"
        return f"Batch {batch_id} generation timed out after {timeout}s: {waits}, {where}"
