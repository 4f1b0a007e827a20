"""Parts of a few bytes, so that payloads of a few more lie in several."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from buffer_service.store.scripts import Script, load_scripts
from buffer_service.store.transport import connection
from buffer_wire.payloads import keys


@contextmanager
def parts_of_bytes(size: int) -> Iterator[None]:
    """Have payloads of more than `size` bytes in parts, for connections that are made meanwhile."""
    usual = keys.PART_BYTES

    def load(*, apart: bool = False) -> Mapping[str, Script]:
        with pytest.MonkeyPatch.context() as undone:
            # They are made once for all tests.
            undone.setattr(keys, "PART_BYTES", usual)
            return {name: _with(script, usual, size) for name, script in load_scripts(apart=apart).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "PART_BYTES", size)
        patch.setattr(keys, "WHOLE_BYTES", size if size != usual else keys.WHOLE_BYTES)
        patch.setattr(connection, "load_scripts", load)
        yield


def _with(script: Script, usual: int, size: int) -> Script:
    source = script.source.replace(f"math.min(size, {usual})", f"math.min(size, {size})")
    assert script.name != "push" or size == usual or source != script.source
    return Script(script.name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
