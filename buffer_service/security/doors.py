"""The doors of a service as its settings ask for them."""

from dataclasses import dataclass
from typing import Self

from buffer_service.rpc_settings import RpcSettings
from buffer_service.security.certificates import Certificates, TlsFiles
from buffer_service.security.gate import Gate
from buffer_service.security.token_file import TokenFile


@dataclass(frozen=True, slots=True)
class Doors:
    """Doors that calls and connections pass: the gate, and the certificates of gRPC and of the admin page."""

    gate: Gate
    certificates: Certificates | None
    """Certificates of gRPC; None: plain text."""
    admin_certificates: Certificates | None
    """Certificates of the admin page; None: plain text."""

    @classmethod
    def of(cls, settings: RpcSettings) -> Self:
        """Raises TokensRefused, TlsRefused."""
        gate = Gate(None if settings.tokens_file is None else TokenFile(settings.tokens_file))
        if settings.tls_cert is None or settings.tls_key is None:
            return cls(gate, None, None)
        cert, key = settings.tls_cert, settings.tls_key
        return cls(
            gate,
            Certificates(TlsFiles(cert, key, settings.tls_client_ca)),
            Certificates(TlsFiles(cert, key, settings.admin_client_ca)),
        )

    @property
    def tls(self) -> str:
        """TLS of gRPC, in a word: `off`, `on` or `mutual`."""
        if self.certificates is None:
            return "off"
        return "mutual" if self.certificates.mutual else "on"
