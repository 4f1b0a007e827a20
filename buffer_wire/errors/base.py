"""Base class of the errors: reason, gRPC code, attributes, and the way over the wire."""

from collections.abc import Mapping
from typing import ClassVar, Self


class RolloutBufferError(Exception):
    """Base of every error of the contract.

    `reason`: stable identifier. `code`: name of the gRPC status code. `retryable`: the same request can succeed
    later. `attributes`: the error's data as text.
    """

    reason: ClassVar[str] = "internal"
    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        self.message = message
        self.attributes: Mapping[str, str] = {k: str(v) for k, v in attributes.items()}

    @classmethod
    def from_wire(cls, message: str, attributes: Mapping[str, str]) -> Self:
        """Rebuild an instance from what travelled, without calling the subclass's constructor."""
        self = cls.__new__(cls)
        RolloutBufferError.__init__(self, message, **attributes)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error as it travels: constructors take other arguments than the message."""
        return type(self).from_wire, (self.message, dict(self.attributes)), self.__dict__
