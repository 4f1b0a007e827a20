"""Certificate authorities and certificates of a test, made with the openssl program."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self.cert, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        subject = ("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE")
        openssl("req", "-x509", *KEY, "-keyout", self._key, "-out", self.cert, "-days", "2", *subject)

    def issue(self, name: str, *, names: str = "DNS:localhost,IP:127.0.0.1", expired: bool = False) -> Certificate:
        """A certificate for these names, good for two days, or over since yesterday."""
        made = Certificate(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        openssl("req", *KEY, "-keyout", made.key, "-out", request, "-subj", f"/CN={name}")
        extensions.write_text(f"subjectAltName={names}\n")
        # A negative number of days: openssl 3.0 can set an end, but no beginning, in the past.
        signer = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", "-1" if expired else "2")
        openssl("x509", "-req", "-in", request, *signer, "-extfile", extensions, "-out", made.cert)
        return made


def openssl(*args: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
