"""The http client of all downloads of a process: its token, TLS, the limit on its bandwidth, and measured rates.

Invariant: a token never goes to another machine in plain text, unless the access says `insecure`.
"""

import ssl
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import aiohttp

from buffer_wire.connection.access import WEIGHTS, Access, TokenSource, stays_here
from buffer_wire.connection.tls_files import TlsFiles, TlsMaterial
from buffer_wire.weights.door import bearer
from rollout_workers.weights.transfer.rates import Rates
from rollout_workers.weights.transfer.throttle import Throttle

STALL_S = 30.0
"""Longest time without a byte before a transfer is given up."""


class WeightClient:
    """Client of servers of weights.

    `access`: token and authorities; what it leaves out comes from the variables RB_WEIGHTS_…. Raises InvalidField.
    """

    def __init__(self, access: Access | None = None, *, stall_s: float = STALL_S, max_mbps: float = 0.0) -> None:
        self._access = (access or Access()).effective(WEIGHTS)
        self._tokens = TokenSource(self._access)
        self._files = TlsFiles(self._access)
        self._tls: tuple[TlsMaterial, ssl.SSLContext] | None = None
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)
        self._session: aiohttp.ClientSession | None = None
        self._throttle = Throttle(max_mbps)
        self.rates = Rates()
        self.received_bytes = 0
        """Bytes of files that came so far."""

    async def took(self, size: int) -> None:
        """Count bytes that came, and wait until they are within the limit."""
        self.received_bytes += size
        await self._throttle.passed(size)

    def get(
        self, url: str, headers: dict[str, str], *, may_redirect: bool = False
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Ask for a file. `may_redirect`: the server may name another place, anywhere. Raises aiohttp's errors."""
        return self._asked("GET", url, headers, may_redirect=may_redirect)

    def head(self, url: str, headers: dict[str, str]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Ask for what there is of a file. Raises aiohttp's errors."""
        return self._asked("HEAD", url, headers)

    def check(self, response: aiohttp.ClientResponse) -> None:
        """Raise ClientResponseError for an answer that is none; of a refused token, a new one is looked for."""
        if response.status == 401:
            self._tokens.renew(self._tokens.current)
            sent = "Authorization" in response.request_info.headers
            why = "the token is refused" if sent else "a token is needed"
            if not sent and self._tokens.current:
                why = "a token is needed, and does not go to another machine in plain text (https, or RB_INSECURE=1)"
            raise aiohttp.ClientResponseError(
                response.request_info, response.history, status=401, message=why, headers=response.headers
            )
        response.raise_for_status()
        if response.status not in (200, 206):
            why = f"status {response.status} in place of a file"
            raise aiohttp.ClientResponseError(
                response.request_info, response.history, status=response.status, message=why, headers=response.headers
            )

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _asked(
        self, method: str, url: str, headers: dict[str, str], *, may_redirect: bool = False
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0)
            )
        sent = {"Accept-Encoding": "identity", **headers}
        token = self._tokens.current
        if token and self._may_carry(url):
            sent["Authorization"] = bearer(token)
        over_tls = urlsplit(url).scheme == "https"
        tls = self._context() if over_tls else True
        return self._session.request(method, url, headers=sent, ssl=tls, allow_redirects=may_redirect)

    def _may_carry(self, url: str) -> bool:
        parts = urlsplit(url)
        return parts.scheme == "https" or self._access.insecure or stays_here(f"{parts.hostname}:0")

    def _context(self) -> ssl.SSLContext:
        material = self._files.current
        if self._tls is None or self._tls[0] is not material:
            authorities = material.ca.decode("ascii", "ignore") if material.ca is not None else None
            context = ssl.create_default_context(cadata=authorities)
            if material.cert is not None:
                context.load_cert_chain(self._access.tls_cert, self._access.tls_key)
            self._tls = material, context
        return self._tls[1]
