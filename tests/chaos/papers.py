"""Mutual TLS of a bout: certificates of an authority of its own, which are renewed while they are in use."""

from collections.abc import Mapping
from pathlib import Path

from tests.security.certificates import Authority, Certificate


class Papers:
    """Certificates of the service and of all clients."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder)
        self._held = {name: self._authority.issue(name) for name in ("server", "client")}

    def settings(self) -> Mapping[str, object]:
        """Settings of the service."""
        server = self._held["server"]
        return {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": self._authority.cert}

    def access(self) -> Mapping[str, str]:
        """Variables of clients."""
        client = self._held["client"]
        return {
            "RB_TLS_CA": str(self._authority.cert),
            "RB_TLS_CLIENT_CERT": str(client.cert),
            "RB_TLS_CLIENT_KEY": str(client.key),
            "RB_TLS_SERVER_NAME": "localhost",
        }

    def renew(self) -> None:
        """Put new ones in the places of all, as those who hold files of certificates do."""
        for name, held in self._held.items():
            made = self._authority.issue(f"{name}-next")
            _replace(made, held)


def _replace(made: Certificate, held: Certificate) -> None:
    made.key.replace(held.key)
    made.cert.replace(held.cert)
