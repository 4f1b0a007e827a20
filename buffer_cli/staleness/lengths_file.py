"""Response lengths from a file: a recording's Parquet, a folder of it, or text with a number a line."""

from collections.abc import Iterable
from pathlib import Path

from buffer_service.simulator.lengths import Empirical
from buffer_wire.errors import InvalidField

_COLUMN = "response_lengths"


def read_lengths(path: Path) -> Empirical:
    """Lengths in tokens. In a text file a line may hold a whole group. Raises InvalidField (--lengths)."""
    try:
        groups = tuple(_parquet(path) if path.is_dir() or path.suffix == ".parquet" else _text(path))
        return Empirical(groups)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidField("--lengths", str(path), f"a recording or a text file of lengths ({error})") from error


def _text(path: Path) -> Iterable[tuple[int, ...]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        numbers = line.partition("#")[0].replace(",", " ").split()
        if numbers:
            yield tuple(int(number) for number in numbers)


def _parquet(path: Path) -> Iterable[tuple[int, ...]]:
    try:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidField("--lengths", str(path), "a text file, or install rollout-buffer[lab]") from error
    folder = path / "groups" if (path / "groups").is_dir() else path
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
    if not files:
        raise ValueError("no Parquet files in it")
    for file in files:
        for lengths in pq.read_table(file, columns=[_COLUMN])[_COLUMN].to_pylist():
            if lengths:
                yield tuple(lengths)
