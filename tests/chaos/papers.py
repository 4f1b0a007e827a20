"""Papers of a bout: mutual TLS of an authority of its own, and tokens. Both are renewed while they are in use."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from buffer_service.security.roles import Role
from buffer_service.security.token_file import changing
from buffer_service.security.tokens import TokenSet
from tests.security.certificates import Authority
from tests.security.guarded import add_token

if TYPE_CHECKING:
    from tests.support.sentinels import Tls


class Papers:
    """Certificates of the service, of its store and of all clients, and the token that all clients have."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder)
        self._held = {name: self._authority.issue(name) for name in ("server", "client")}
        store = self._authority.issue("store")
        self.store: Tls = (store.cert, store.key, self._authority.cert)
        self._tokens, self._token = folder / "tokens", folder / "token"
        self._rotations = 0
        self._give_token()

    def settings(self) -> Mapping[str, object]:
        """Settings of the service."""
        server = self._held["server"]
        return {
            "tls_cert": server.cert,
            "tls_key": server.key,
            "tls_client_ca": self._authority.cert,
            "tokens_file": self._tokens,
        }

    def access(self) -> Mapping[str, str]:
        """Variables of clients."""
        client = self._held["client"]
        return {
            "RB_TLS_CA": str(self._authority.cert),
            "RB_TLS_CLIENT_CERT": str(client.cert),
            "RB_TLS_CLIENT_KEY": str(client.key),
            "RB_TLS_SERVER_NAME": "localhost",
            "RB_TOKEN_FILE": str(self._token),
        }

    def renew(self) -> None:
        """Put new certificates in the places of all, as those who hold files of certificates do."""
        for name, held in self._held.items():
            made = self._authority.issue(f"{name}-next")
            made.key.replace(held.key)
            made.cert.replace(held.cert)

    def rotate(self) -> None:
        """Give all clients another token, and revoke the one that they have at once."""
        self._give_token()
        with changing(self._tokens) as held:
            held[0] = TokenSet(held[0].entries[-1:])

    def _give_token(self) -> None:
        self._rotations += 1
        new = self._token.with_suffix(".new")
        new.write_text(add_token(self._tokens, f"chaos-{self._rotations}", Role.ADMIN, "*"))
        new.replace(self._token)
