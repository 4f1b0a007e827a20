"""Proofs of revisions: what the scripts give out with a revision, and believe a revision ahead of the store by."""

import hashlib

from buffer_wire.revision import Revision

PROOF_CHARS = 16


def prove(secret: str, revision: int) -> Revision:
    """The revision with its proof, which nobody can make without the run's secret."""
    digest = hashlib.sha1(f"{secret}:{revision:d}".encode(), usedforsecurity=False).hexdigest()
    return Revision(revision, digest[:PROOF_CHARS])
