"""Makes certificates for tests with openssl: authorities, and certificates that they sign."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from rpc_runtime.wire.security import TlsFiles

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str) -> None:
    try:
        subprocess.run(["openssl", *arguments], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("needs openssl to make certificates")


@dataclass(frozen=True)
class Authority:
    """An authority that signs certificates; the TLS files from ``files`` trust it."""

    folder: Path
    name: str

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def files(
        self, name: str, *, names: str = "DNS:localhost,IP:127.0.0.1", days: int = 60, usage: str = ""
    ) -> TlsFiles:
        """Return a certificate for the host names ``names``, valid for so many days; if negative, it has expired."""
        key, request, pem = (self.folder / f"{name}.{ending}" for ending in ("key", "csr", "pem"))
        extensions = self.folder / f"{name}.extensions"
        extensions.write_text(f"subjectAltName={names}\n" + (f"extendedKeyUsage={usage}\n" if usage else ""))
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        signer = ("-CA", str(self.certificate), "-CAkey", str(self.certificate.with_suffix(".key")), "-CAcreateserial")
        dated = ("-days", str(days), "-extfile", str(extensions))
        _openssl("x509", "-req", "-in", str(request), *signer, *dated, "-out", str(pem))
        return TlsFiles(self.certificate, pem, key)


def make_authority(folder: Path, name: str = "lab", *, days: int = 60) -> Authority:
    authority = Authority(folder, name)
    key, request = (str(authority.certificate.with_suffix(ending)) for ending in (".key", ".csr"))
    _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    extensions = folder / f"{name}.extensions"
    extensions.write_text("basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n")
    dated = ("-days", str(days), "-extfile", str(extensions))
    _openssl("x509", "-req", "-in", request, "-key", key, *dated, "-out", str(authority.certificate))
    return authority


def worker_arguments(files: TlsFiles, *, mutual: bool) -> list[str]:
    """Return the command-line options of a worker with these files."""
    arguments = ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--json"]
    return [*arguments, "--tls-ca", str(files.authority)] if mutual else arguments
