"""Output directory that bridge and trainer share, and the trainer's position read from it.

    rollouts/step_N/rank_R.bin        the bridge's: whole when it has its name
    broadcasts/step_N/… and STABLE    the trainer's: v(N), whole when STABLE was touched
    checkpoints/step_N/trainer        the trainer's: whole when it has torch's .metadata

The trainer touches STABLE of v(N − 1) when it starts at step N, and of v(N) after it. So the STABLE that was touched
last gives the trainer's position, whatever an earlier life of it left behind.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from buffer_wire.errors import InvalidField

STABLE = "STABLE"
_ADAPTER = "adapter_config.json"


class OutputDir:
    """Output directory of the trainer, shared with the bridge.

    `root`: the trainer's output_dir. `checkpoints`: the folder of its checkpoints; None: below `root`.
    """

    def __init__(self, root: Path, checkpoints: Path | None = None) -> None:
        self.root = root.resolve()
        self._rollouts = self.root / "rollouts"
        self._broadcasts = self.root / "broadcasts"
        self._checkpoints = (checkpoints or self.root).resolve() / "checkpoints"

    def position(self) -> int | None:
        """Return N of the weights that the trainer has: it has trained N steps. None before its first broadcast."""
        touched = []
        for step, path in _steps(self._broadcasts):
            try:
                touched.append(((path / STABLE).stat().st_mtime_ns, step))
            except FileNotFoundError:
                continue
        return max(touched)[1] if touched else None

    def stable(self, step: int) -> Path:
        """Return the path of STABLE of v(step)."""
        return self._broadcasts / f"step_{step}" / STABLE

    def copy_weights(self, step: int, folder: Path) -> None:
        """Copy the files of v(step) into `folder`. Raises InvalidField when they are no whole model.

        They are copied, not linked, and once more if they changed meanwhile: a trainer that begins again writes them in
        place.
        """
        source = self.stable(step).parent
        if (source / _ADAPTER).exists():
            raise InvalidField("model.lora", str(source), "unset in the trainer: engines take whole models only")
        if not any(source.glob("*.safetensors")):
            raise InvalidField("weight_broadcast.type", str(source), '"filesystem" in the trainer: it has no weights')
        ignored = shutil.ignore_patterns(STABLE)
        before = None
        while before != (before := _stamps(source)):
            shutil.copytree(source, folder, ignore=ignored, copy_function=shutil.copyfile, dirs_exist_ok=True)

    def checkpointed(self, trained: int) -> int:
        """Return the steps in the newest whole checkpoint of at most `trained`; 0 without one.

        Later checkpoints are of an earlier life of the trainer.
        """
        found = ((step, path / "trainer" / ".metadata") for step, path in _steps(self._checkpoints))
        return max((step for step, whole in found if step <= trained and whole.exists()), default=0)

    def write_rollouts(self, step: int, ranks: Sequence[bytes]) -> None:
        """Put the files of step N in place, one per data rank."""
        folder = self._rollouts / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, content in enumerate(ranks):
            temporary = folder / f"rank_{rank}.bin.tmp"
            temporary.write_bytes(content)
            temporary.replace(folder / f"rank_{rank}.bin")

    def remove_rollouts(self, *, below: int = 0, above: int | None = None) -> None:
        """Remove rollouts that no trainer reads: of steps that are trained, or of another run."""
        for step, path in _steps(self._rollouts):
            if step < below or (above is not None and step > above):
                shutil.rmtree(path)


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal():
            yield int(number), path


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    found = ((path.name, path.stat()) for path in folder.iterdir())
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
