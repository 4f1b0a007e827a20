"""Errors of the doors: who calls is not known, or may not do this."""

from buffer_wire.errors.base import RolloutBufferError


class AccessRefused(RolloutBufferError):
    """Refused before the service's rules were asked; no repeat of the same request mends it."""

    reason = "access_refused"
    code = "PERMISSION_DENIED"


class Unauthenticated(AccessRefused):
    """The call carries no token that the service knows. Attributes: why.

    Clients that have their token from a file read it again and try once more.
    """

    reason = "unauthenticated"
    code = "UNAUTHENTICATED"

    def __init__(self, why: str) -> None:
        super().__init__(f"not authenticated: {why}", why=why)


class PermissionDenied(AccessRefused):
    """The token does not allow this; says nothing about whether the run exists. Attributes: method, token_id, role."""

    reason = "permission_denied"

    def __init__(self, method: str, token_id: str, role: str, why: str) -> None:
        super().__init__(f"token {token_id!r} ({role}) may not {why}", method=method, token_id=token_id, role=role)
