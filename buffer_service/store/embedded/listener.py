"""Listener: where the embedded store listens beside its unix socket, for clients on other hosts."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Listener:
    """Host and port; with TLS where there are a certificate and its key, and then without plain text."""

    host: str
    port: int
    cert: Path | None = None
    """PEM file of the certificate chain."""
    key: Path | None = None
    """PEM file of its private key."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}{' with TLS' if self.cert is not None else ''}"

    @property
    def settings(self) -> tuple[str, ...]:
        """Options of the server."""
        bind = ("--bind", self.host)
        if self.cert is None:
            return (*bind, "--port", str(self.port))
        files = (f"--{setting}" if index % 2 == 0 else setting for index, setting in enumerate(self.certificate))
        # Clients prove who they are by their users' passwords.
        return (*bind, "--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no", *files)

    @property
    def certificate(self) -> tuple[str, ...]:
        """Settings of certificate and key, names and values by turns; the server reads the files when they are set."""
        if self.cert is None or self.key is None:
            return ()
        # The server runs in the folder of its data. A link is not followed here: renewals change where it leads.
        return ("tls-cert-file", str(self.cert.absolute()), "tls-key-file", str(self.key.absolute()))

    def is_why(self, log: str) -> bool:
        """True when the log of a server that ended says that it was built without TLS.

        Valkey 9.1 says so. Others refuse the options before there is a log.
        """
        return self.cert is not None and ("Failed finding TLS support" in log or log == "(empty)")

    def refusal(self, binary: Path) -> str:
        """Text that says so, and what to do."""
        return (
            f"its server {binary} was built without TLS, which payload_listen needs beside tls_cert; name one that "
            "has it by store_binary (--store-binary), or leave payload_listen out: then clients elsewhere relay"
        )
