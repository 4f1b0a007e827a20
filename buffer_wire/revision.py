"""The value that tells how far a run has come: its revision, with the proof that the service gave it out."""

from typing import Protocol, Self


class Claimable(Protocol):
    """A reply whose revision may be sent back."""

    revision: int
    revision_proof: str


class Revision(int):
    """A revision; `proof` is empty where there is none, and then it says nothing to the service."""

    proof: str

    def __new__(cls, number: int = 0, proof: str = "") -> Self:  # noqa: D102 (a value)
        revision = super().__new__(cls, number)
        revision.proof = proof
        return revision

    @classmethod
    def of(cls, reply: Claimable) -> Self:
        """The revision of a reply."""
        return cls(reply.revision, reply.revision_proof)


NO_REVISION = Revision()
"""Revision of a caller who has seen none."""
