"""Collective publisher: broadcasts weights to the engines in a process group: no file is written and none is read.

    with CollectivePublisher(files=FilesPublisher("/tmp/weights", serve="http")) as publisher:
        with client.session("math", policy=policy, tasks=tasks, publisher=publisher) as session:
            for batch in session:
                train(batch)
                session.publish(model)

Each publish asks the run which engines live, has them join and pause (`update`), and sends. The version is published
once they have all received it. Engines that fail are left out, and asked again at the next publish. If all failed in a
group that existed before, they are asked at once, in a new group. With `files`, every `files_every`-th version is
written as files too, and so is any that an engine outside of the group has to load. Without, such an engine waits for
the next version. If every engine is replaced after a version without files, they wait for the next publish and the
trainer for their groups. With `keep_copy` the session of a trainer of one rank ends that: it repeats the last version
from a copy in main memory. Otherwise only files, or one more publish, end it.

Invariant: the group that is kept for the next publish is one in which nothing has failed.
"""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from buffer_wire.errors import CollectiveFailed, InvalidField, NotReady
from trainer_client.client.driver import Deadline
from trainer_client.manifest import CollectiveManifest, FilesManifest, Manifest
from trainer_client.publish.collective.buckets import bucket_counts
from trainer_client.publish.collective.group import TrainerGroup
from trainer_client.publish.collective.members import candidates, next_membership, others, ranked, unheard
from trainer_client.publish.collective.plan import Backend, CollectivePlan, TensorSpec
from trainer_client.publish.collective.update import AttemptFailed, Update, pause_between_polls
from trainer_client.publish.copies import KeptCopy
from trainer_client.publish.files import FilesPublisher
from trainer_client.publish.named_tensors import NamedTensors, named_tensors, specs_of
from trainer_client.publish.publication import Publication, WeightSource
from trainer_client.publish.saving import save_tensors
from trainer_client.state import Engine, RunState, WeightVersion

logger = logging.getLogger("trainer_client")

_NAME_CHARS = 64
_LONGER_S = 5.0


class CollectivePublisher:
    """Publisher that broadcasts to the run's engines. Pass it to `BufferClient.session`; close it after the run.

    `backend`: "gloo" (CPU) or "nccl" (GPU); None: by the device of the tensors. `address`: this process as the engines
    reach it. `port`: where a group meets, 0 for any free one each time. `timeout_s`: for joining and again for
    receiving. `slack_s`: what pausing and reporting may take beyond it. `regroups`: number of times that one publish is
    begun anew after a failure.

    `files`: publisher of the fallbacks, closed with this one. `save`: writes a fallback, by default the tensors alone.
    `keep_copy`: hold the last version that has no files in main memory, as large as the model.

    `bucket_bytes`: successive tensors of one dtype are sent together, up to so many bytes. A member has one bucket
    beside its model, this process up to three. A broadcast that breaks between two leaves members without usable
    weights. 0, or a member whose worker is of a release before buckets: tensors are sent one by one, and members have a
    second model in memory until all are there.
    """

    def __init__(  # noqa: PLR0913 - options of one mechanism
        self,
        *,
        backend: Backend | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 60.0,
        slack_s: float = 30.0,
        regroups: int = 3,
        files: FilesPublisher | None = None,
        files_every: int = 1,
        save: Callable[[Path], object] | None = None,
        keep_copy: bool = False,
        bucket_bytes: int = 512 << 20,
    ) -> None:
        for field, value, least in (
            ("regroups", regroups, 0),
            ("files_every", files_every, 1),
            ("timeout_s", timeout_s, 0.1),
            ("bucket_bytes", bucket_bytes, 0),
        ):
            if value < least:
                raise InvalidField(field, value, f"at least {least}")
        if backend not in (None, "gloo", "nccl"):
            raise InvalidField("backend", backend, "'gloo', 'nccl', or None")
        self._backend = backend
        self._used: Backend = backend or "gloo"
        """Backend of the newest version. A repetition uses it too: its tensors come from main memory, wherever they
        were."""
        self._address = address
        self._port = port
        self._timeout_s = timeout_s
        self._slack_s = slack_s
        self._regroups = regroups
        self._files = files
        self._files_every = files_every
        self._save = save
        self._copy = KeptCopy() if keep_copy else None
        self._bucket_bytes = bucket_bytes
        self._without_files = files_every
        """Number of publishes since the last one with files; the first has them."""
        self._group: TrainerGroup | None = None
        self._membership = 0
        """Number of the group, or of the last one."""
        self._inside: tuple[str, ...] = ()
        """Engines in the group, in the order of their ranks."""
        self._failed_at: dict[str, float] = {}
        """Engines that failed, with the time when the attempt began. One that has been silent since would cost as much
        time again."""

    # ── WeightPublisher ──────────────────────────────────────────────────────

    def offer(self, source: WeightSource, publication: Publication) -> Manifest:
        """Broadcast the weights; returns when every member has received them and waits, paused, for the publish.

        `source`: a state dict, a module, ShardedWeights, or a function that gives names and tensors, called once, and
        once more for each attempt and for files. Raises CollectiveFailed or NotReady when no engine takes part and
        there are no `files`, naming them; InvalidField; what `source` raises; VersionConflict, StaleTerm.
        """
        tensors = named_tensors(source)
        specs, on_gpu = specs_of(tensors)
        self._used = self._backend or ("nccl" if on_gpu else "gloo")
        return self._offer(publication, tensors, specs, copy_into=self._copy)

    def repeats(self, version: int) -> bool:
        """True when `version` has no files and its copy is kept."""
        return self._copy is not None and self._copy.version == version

    def repeat(self, publication: Publication) -> Manifest:
        """Broadcast the kept copy as the publication's version. Raises what `offer` raises."""
        if self._copy is None or self._copy.version is None:
            raise InvalidField("keep_copy", None, "on, and a version broadcast without files, to repeat it")
        specs, _ = specs_of(self._copy.tensors)
        return self._offer(publication, self._copy.tensors, specs, copy_into=None)

    def _offer(
        self,
        publication: Publication,
        tensors: NamedTensors,
        specs: tuple[TensorSpec, ...],
        *,
        copy_into: KeptCopy | None,
    ) -> Manifest:
        failed: dict[str, str] = {}
        why = "every engine failed"
        fallback: FilesManifest | None = None
        attempts = 1 + self._regroups
        all_in_old_group = True
        for attempt in range(1, 1 + attempts):
            run, engines = self._candidates(publication, failed)
            if not engines and failed and all_in_old_group and self._files is None:
                # Engines that left it, with a worker that was started anew, say, have had no other way.
                failed, all_in_old_group = {}, False
                run, engines = self._candidates(publication, failed)
            due = self._without_files + 1 >= self._files_every
            if self._files is not None and fallback is None and (due or not engines or others(run, engines)):
                fallback = self._written(tensors, specs, publication)
            if not engines:
                break
            began = time.monotonic()
            all_in_old_group = all_in_old_group and self._is_group_of(engines)
            try:
                sent = copy_into.copying(tensors) if copy_into is not None and fallback is None else tensors
                self._attempt(publication, run, engines, sent, specs)
            except AttemptFailed as error:
                failed |= error.members
                self._failed_at |= dict.fromkeys(error.members, began)
                why = str(error)
                logger.warning(
                    "publishing version %d: attempt %d of %d failed: %s",
                    publication.version,
                    attempt,
                    attempts,
                    why,
                )
                continue
            self._without_files = 0 if fallback is not None else self._without_files + 1
            if self._copy is not None and fallback is None:
                self._copy.version = publication.version
            return CollectiveManifest(self._membership, fallback)
        if fallback is None and self._files is not None:
            fallback = self._written(tensors, specs, publication)
        if fallback is None:
            raise CollectiveFailed(publication.version, failed, why)
        self._without_files = 0
        return fallback

    def manifest_of(self, version: int) -> FilesManifest:
        """Make the manifest of the files of a version that was published with some.

        Raises InvalidField that names such versions.
        """
        if self._files is None:
            raise InvalidField("version", version, "one with files, and this publisher was given no `files`")
        return self._files.manifest_of(version)

    def offer_again(self, version: int, publication: Publication) -> Manifest:
        """Offer an older version's files as the publication's version, to every engine. Raises InvalidField."""
        if self._files is None:
            raise InvalidField("version", version, "one with files, and this publisher was given no `files`")
        return self._files.offer_again(version, publication)

    def published(self, manifest: Manifest, *, committed_steps: int) -> None:
        """Record that the service offers `manifest` now."""
        files = manifest.fallback if isinstance(manifest, CollectiveManifest) else manifest
        if self._copy is not None and files is not None:
            self._copy.version = None  # That of an earlier version, or of an abandoned one of this number.
        if self._files is not None and files is not None:
            self._files.published(files, committed_steps=committed_steps)

    def checkpointed(self, steps: int) -> None:
        """Record that no resume goes back before step `steps` any more."""
        if self._files is not None:
            self._files.checkpointed(steps)

    def resumed(self, next_step: int) -> None:
        """Abandon versions published after more than `next_step` steps; the next publish has files."""
        self._without_files = self._files_every
        if self._copy is not None:
            self._copy.version = None
        if self._files is not None:
            self._files.resumed(next_step)

    def close(self) -> None:
        """Leave the group and close `files`."""
        self._leave()
        if self._files is not None:
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── inside ───────────────────────────────────────────────────────────────

    def _candidates(self, publication: Publication, failed: dict[str, str]) -> tuple[RunState, tuple[Engine, ...]]:
        """Read the run and select the engines that can take part; waits for the first where there is no other way."""
        deadline, notices = Deadline.after(self._timeout_s), publication.notices("finding engines")
        while True:
            run = publication.state(timeout_s=self._timeout_s)
            engines = candidates(run, {*failed, *self._unheard(run)})
            if engines or failed or self._files is not None:
                return run, engines
            states = ", ".join(f"{engine.engine_id} ({engine.state})" for engine in run.engines)
            waits_on = f"the engines {states}" if states else "workers to report their engines"
            missing = NotReady(
                f"no engine can receive version {publication.version}; waiting on {waits_on}", waits_on=waits_on
            )
            if deadline.left_s() == 0.0:
                raise missing
            notices.tell(missing)
            pause_between_polls(deadline)

    def _unheard(self, run: RunState) -> tuple[str, ...]:
        now = time.monotonic()
        for engine_id, failed_at in list(self._failed_at.items()):
            if not unheard(run, [engine_id], now - failed_at):
                del self._failed_at[engine_id]
        return tuple(self._failed_at)

    def _attempt(
        self,
        publication: Publication,
        run: RunState,
        engines: tuple[Engine, ...],
        tensors: NamedTensors,
        specs: tuple[TensorSpec, ...],
    ) -> None:
        group, joined = self._group_of(publication, run, engines)
        in_buckets = self._bucket_bytes > 0 and all(engine.takes_buckets for engine in engines)
        plan = CollectivePlan(
            version=WeightVersion(publication.term, publication.version),
            phase="prepare",
            membership=self._membership,
            master_address=self._address,
            master_port=group.port,
            group_name=group.name,
            backend=self._used,
            world_size=group.world_size,
            members=ranked(engines),
            tensors=specs,
            timeout_ms=round(self._timeout_s * 1000),
            established=joined,
            bucket_tensors=bucket_counts(specs, self._bucket_bytes) if in_buckets else (),
        )
        update = Update(publication, plan, group, slack_s=self._slack_s)
        try:
            update.run(tensors, run, join=not joined)
        except BaseException:
            self._leave()
            raise

    def _is_group_of(self, engines: tuple[Engine, ...]) -> bool:
        """True when the present group has exactly these engines, for the present backend."""
        return (
            self._group is not None
            and self._group.backend == self._used
            and self._inside == tuple(engine.engine_id for engine in engines)
            and all(engine.membership == self._membership for engine in engines)
        )

    def _group_of(
        self, publication: Publication, run: RunState, engines: tuple[Engine, ...]
    ) -> tuple[TrainerGroup, bool]:
        """Return the group of these engines, and True when all of them are in it already; else one is made anew."""
        if self._group is not None and self._is_group_of(engines):
            return self._group, True
        self._leave()
        ids = tuple(engine.engine_id for engine in engines)
        self._membership = next_membership(self._membership, run.engines)
        # No engine can have been in a group of that name, not even in one of an earlier trainer.
        name = f"{publication.run_id[:_NAME_CHARS]}.{self._membership}.{secrets.token_hex(4)}"
        self._group = TrainerGroup(
            name=name,
            backend=self._used,
            world_size=1 + len(ids),
            port=self._port,
            # The wait for the members ends first: it knows who is late.
            timeout_s=self._timeout_s + self._slack_s + _LONGER_S,
        )
        self._inside = ids
        return self._group, False

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._inside = None, ()

    def _written(
        self, tensors: NamedTensors, specs: tuple[TensorSpec, ...], publication: Publication
    ) -> FilesManifest | None:
        if self._files is None:
            return None
        save = self._save or (lambda directory: save_tensors(tensors, directory, specs=specs))
        return self._files.write(save, term=publication.term, version=publication.version)
