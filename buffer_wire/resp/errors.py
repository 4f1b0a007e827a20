"""Errors that a request over RESP can end in."""


class ReplyError(Exception):
    """An error reply; `code` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


class ConnectionLost(Exception):
    """The connection ended; whether the request ran is not known."""


class OtherReply(Exception):
    """A reply, the one at `index`, that is no error and not what was expected; `line` is how it begins."""

    def __init__(self, index: int, line: str) -> None:
        super().__init__(f"reply {index} begins with {line!r}")
        self.index = index
        self.line = line
