"""Files of a manifest from a directory of this machine, or of a shared disk.

A hard link where the file system allows it, so that the publisher may remove its own name for it at any time; a copy
otherwise. A linked file is never written to.
"""

import hashlib
import os
from pathlib import Path

from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.weights.files import check_content, check_source, hash_into


def take_file(label: str, origin: Path, file: weights_pb2.WeightFile, target: Path) -> None:
    """Link or copy one file and check what lies at `target`. Blocking.

    Raises WeightsInvalid, WeightsUnavailable; then nothing is left at `target`, where a link would be written through.
    """
    state = hashlib.sha256()
    target.unlink(missing_ok=True)
    try:
        check_source(label, file, origin)
        if _link(origin, target):
            size = hash_into(target, state)
        else:
            with target.open("xb") as copy:
                size = hash_into(origin, state, copy.write)
        check_content(label, file, size, state.digest())
    except OSError as error:
        target.unlink(missing_ok=True)
        raise WeightsUnavailable(label, str(origin), error.strerror or str(error)) from error
    except WeightsInvalid:
        target.unlink(missing_ok=True)
        raise


def _link(origin: Path, target: Path) -> bool:
    try:
        # A symbolic link would be linked as such: resolve it.
        os.link(origin.resolve(), target)
    except OSError:
        return False
    return True
