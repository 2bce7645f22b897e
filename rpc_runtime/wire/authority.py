"""A lab's certificate authority: makes and renews the certificates of its machines and people."""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rpc_runtime.errors import InputError
from rpc_runtime.files import replacing
from rpc_runtime.private_folder import private_folder

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise InputError("certificates are made with cryptography: pip install 'tvm-split[certs]'") from error

NAME = "lab-ca"
"""The name of the authority and of its files."""
_OF_AUTHORITY = x509.KeyUsage(*[False] * 5, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False)
_PEM = serialization.Encoding.PEM


def certify(folder: Path, name: str, addresses: Sequence[str], lifetime: timedelta) -> Path:
    """Write NAME.pem and NAME.key, of a host if it has ``addresses``, else of a client; return the certificate.

    The authority that signs it is in the same folder, where it is made if it is missing.

    Raises:
        InputError: the name cannot be a file's, an address is no host's, or the authority's files cannot be used.
        OSError: files cannot be read or written, or another user could change them.
    """
    if name == NAME or not name or Path(name).name != name or len(name) > 64:
        raise InputError(f"a certificate needs a name of 1 to 64 letters for its files, other than {NAME}: {name!r}")
    private_folder(folder)
    authority = folder / f"{NAME}.key"
    if not authority.exists() and not authority.with_suffix(".pem").exists():
        _write(folder, NAME, None, timedelta(days=3650), [_OF_AUTHORITY])
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *[ExtendedKeyUsageOID.SERVER_AUTH] * bool(addresses)]
    try:
        names = x509.SubjectAlternativeName(list(map(_general_name, addresses)))
        signing_key = serialization.load_pem_private_key(authority.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise InputError(f"cannot certify {name} at {', '.join(addresses)} with {authority}: {error}") from error
    return _write(folder, name, signing_key, lifetime, [x509.ExtendedKeyUsage(usages), *[names] * bool(addresses)])


def _write(folder: Path, name: str, signing_key: Any, lifetime: timedelta, extensions: Sequence[Any]) -> Path:
    """Write a new key and its certificate, signed by ``signing_key``, or by itself if it is an authority."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    basic = x509.BasicConstraints(ca=signing_key is None, path_length=None)
    signing_key = signing_key or key
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, NAME))
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + lifetime)  # clocks differ
    identifiers = (
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
    )
    for extension in (basic, *extensions, *identifiers):
        builder = builder.add_extension(extension, isinstance(extension, x509.BasicConstraints | x509.KeyUsage))
    secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    signed = builder.sign(signing_key, hashes.SHA256()).public_bytes(_PEM)
    for ending, content in (("key", secret), ("pem", signed)):
        with replacing(folder / f"{name}.{ending}") as file:
            file.write(content)
    return folder / f"{name}.pem"


def _general_name(address: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)
