"""Protocol of HTTP servers within other programs: uvicorn's, with a correction (extras service, agents)."""

try:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ImportError(f"HTTP servers need uvicorn: pip install 'rollout-buffer[service]' ({error})") from error


class AnswersOnce(H11Protocol):
    """Protocol that answers a body which breaks HTTP's rules only where its request has no answer yet.

    uvicorn's own answers it although the request is being answered, or has been.
    """

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn hands it over
        """Answer a body that breaks the rules, or end its connection."""
        if self.cycle is not None:
            # Whatever is still made for this connection is for nobody.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # Without a body, which an answer to HEAD cannot have.
            headers = [(b"connection", b"close"), (b"content-length", b"0")]
            answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (answer, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()
        else:
            self.transport.abort()
