"""What a request over RESP can end in."""


class ReplyError(Exception):
    """An error reply; `code` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


class ConnectionLost(Exception):
    """The connection ended; whether the request ran is not known."""
