"""Find out what is wrong with TLS files, and why a TLS connection fails; gRPC only reports a closed socket.

All checks use Python's ``ssl``. A certificate and its key are tested by a TLS handshake with themselves, in memory,
which fails in the same way as a real connection.
"""

import logging
import math
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from rpc_runtime.errors import AccessError, InputError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.security import PRIVATE_KEY, TlsFiles, pem_content
from rpc_runtime.wire.text import cleaned

logger = logging.getLogger(__name__)

WARNING_DAYS = 28
_VALIDITY = re.compile(rb"\x30.\x17\x0d\d{12}Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z", re.DOTALL)
"""The dates of a certificate in DER: of both, years have two digits before 2050, four afterwards (RFC 5280)."""
PROBE_SECONDS = 2.0
_NOT_YET_VALID, _EXPIRED = 9, 10  # of X509_V_ERR_… in openssl/x509_vfy.h
_OWN_FAULTS = {_EXPIRED: "has expired: get a new one", _NOT_YET_VALID: "is not valid yet: check this machine's clock"}
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_ANOTHER_NAME = (62, 64)


class WorkerCertificates:
    """The TLS files with which a worker serves; a new connection gets what they hold then.

    If changed files cannot be used, as while one of two is written, the old content stays.

    Raises:
        InputError: a file is missing or no PEM, key and certificate do not belong together, or a date has passed.
    """

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._contents, self._ends = tls.contents(), _ends(tls)
        self._fault = ""

    @property
    def expires(self) -> int:
        """When the first of the files expires, in seconds since 1970."""
        return int(min(self._ends.values()))

    def warn(self) -> None:
        """Log a warning of each file that has expired, or does so within `WARNING_DAYS`."""
        self._configuration()
        for file, end in self._ends.items():
            days = (end - time.time()) / 86400
            if days < WARNING_DAYS:
                when = f"expires on {_date(end)}, in {days:.0f} days" if days > 0 else f"expired on {_date(end)}"
                logger.warning("%s %s: get a new one in time", file, when)

    def credentials(self) -> Any:
        """Return gRPC's credentials; with an authority, callers need a certificate too (mutual TLS)."""
        read = self._configuration
        return grpc.dynamic_ssl_server_credentials(read(), read, self._tls.authority is not None)

    def _configuration(self) -> Any:
        """Return what the next connection gets; gRPC asks before each TLS handshake."""
        try:
            if self._contents != (contents := self._tls.contents()):
                self._ends, self._contents = _ends(self._tls), contents
            self._fault = ""
        except InputError as error:
            if self._fault != str(error):
                logger.error("%s; new connections get the certificate that was read before", error)
            self._fault = str(error)
        authority, key, certificate = self._contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _ends(tls: TlsFiles) -> dict[Path | None, float]:
    """Return when the certificate and the authority of a worker expire, in seconds since 1970."""
    ends = {tls.certificate: _own_end(tls, as_server=True)}
    if tls.authority is not None:
        ends[tls.authority] = _trust(_context(), tls.authority)
    return ends


def require_current(pem: bytes) -> None:
    """Raise an `AccessError` if a caller's certificate has expired since TLS accepted it for the connection."""
    (short, long), now = _VALIDITY.findall(ssl.PEM_cert_to_DER_cert(pem.decode()))[0], time.gmtime()
    if (long or b"20" + short).decode() < time.strftime("%Y%m%d%H%M%S", now):
        raise AccessError("the caller's certificate has expired: get a new one")


def seen_by_caller(address: str, tls: TlsFiles) -> tuple[tuple[str, ...], float]:
    """Return the host names in a worker's certificate, and when it or the caller's expires first (s since 1970).

    Connects to the worker, with a timeout of `PROBE_SECONDS`.

    Raises:
        InputError: a file of the caller is invalid.
        OSError: there is no connection, or the certificate is not accepted.
    """
    with _joined(address, tls) as secured:
        shown: Any = secured.getpeercert()
    end = min(ssl.cert_time_to_seconds(shown["notAfter"]), _own_end(tls, as_server=False))
    return tuple(cleaned(name) for _, name in shown.get("subjectAltName", ())), end


def tls_refusal(address: str, tls: TlsFiles | None) -> str | None:
    """Return the TLS reason why a connection to the worker at ``address`` fails; None if TLS is not the reason.

    Connects to the worker, with a timeout of `PROBE_SECONDS`.
    """
    is_joined = False
    try:
        with _joined(address, tls) as secured:
            if tls is None:
                return "it speaks TLS, and this call does not: give its certificate authority (`tls`, or --tls-ca)"
            is_joined = True
            if secured.recv(1):
                return None
    except InputError as error:
        return str(error)
    except ssl.SSLCertVerificationError as error:
        return _about_its_certificate(error, Address.parse(address).host, tls)
    except OSError as error:
        if tls and getattr(error, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return "it does not speak TLS, and this call does: start it with --tls-certificate, or leave `tls` out"
        if not is_joined or isinstance(error, TimeoutError):
            return None
    # It closed the connection after a good handshake; gRPC's servers do not report why.
    if tls is None or tls.certificate is None:
        return "it asks its callers for a certificate: give one and its key (`tls`, or --tls-certificate and --tls-key)"
    return (
        f"it does not accept the certificate {tls.certificate}: the authority that signed it is not the one that the "
        "worker has as --tls-ca"
    )


@contextmanager
def _joined(address: str, tls: TlsFiles | None) -> Iterator[ssl.SSLSocket]:
    host, context = Address.parse(address), _calling(tls)
    with host.connect(PROBE_SECONDS) as plain, context.wrap_socket(plain, server_hostname=host.host) as secured:
        yield secured


def _about_its_certificate(error: ssl.SSLCertVerificationError, host: str, tls: TlsFiles | None) -> str:
    authority = tls and tls.authority
    issuer = f"the authority in {authority}" if authority else "an authority that this system knows"
    unknown = f"not signed by {issuer}: give the authority that signed it (`tls`, or --tls-ca)"
    another_name = f"not for the host {host!r}: call it by the name that its certificate has"
    faults = {_NOT_YET_VALID: "not valid yet: check the clocks of both machines"}
    faults |= dict.fromkeys(_UNKNOWN_AUTHORITY, unknown) | dict.fromkeys(_ANOTHER_NAME, another_name)
    if error.verify_code == _EXPIRED:
        return "its certificate has expired: get it a new one"
    return f"its certificate is {faults.get(error.verify_code, f'not accepted: {error.verify_message}')}"


def _context(side: int = ssl.PROTOCOL_TLS_CLIENT) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # gRPC judges how strong keys have to be
    context.set_alpn_protocols(["h2"])
    return context


def _calling(tls: TlsFiles | None) -> ssl.SSLContext:
    """Return the TLS context of a caller with these files; raise `InputError` if one is invalid.

    Without files it verifies nothing, and only finds out whether the other side speaks TLS.
    """
    context = _context()
    if tls is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    if tls.authority is None:
        context.load_default_certs()
    else:
        _trust(context, tls.authority)
    _own_end(tls, as_server=False)
    _load_pair(context, tls)
    return context


def _trust(context: ssl.SSLContext, file: Path) -> float:
    """Trust a file's authorities; return when the last one expires, in seconds since 1970 (without one: infinite).

    Raises:
        InputError: the file has no certificate in PEM, or all its authorities have expired.
    """
    pem_content(file)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise InputError(f"{file} holds no certificate in PEM") from error
    dates = (str(authority["notAfter"]) for authority in context.get_ca_certs())
    end = max(map(ssl.cert_time_to_seconds, dates), default=math.inf)
    if end < time.time():
        raise InputError(
            f"the authority in {file} expired on {_date(end)}: the certificates that it signed are not accepted"
        )
    return end


def _own_end(tls: TlsFiles, *, as_server: bool) -> float:
    """Return when ``tls.certificate`` expires, in seconds since 1970; infinite without a certificate.

    Raises:
        InputError: the certificate or its key cannot be used by a worker, or by a caller if not ``as_server``.
    """
    certificate = tls.certificate
    if certificate is None:
        return math.inf
    server, client = _context(ssl.PROTOCOL_TLS_SERVER), _context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for end in (server, client):
        _load_pair(end, tls)
    judging = client if as_server else server
    judging.verify_mode = ssl.CERT_REQUIRED
    judging.load_verify_locations(certificate)
    judging.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is its own authority
    try:
        shown = _handshake(server, client)
    except ssl.SSLCertVerificationError as error:
        other = f"cannot be used by a {'worker' if as_server else 'caller'}: {error.verify_message}"
        raise InputError(f"the certificate {certificate} {_OWN_FAULTS.get(error.verify_code, other)}") from error
    return float(ssl.cert_time_to_seconds(shown["notAfter"]))


def _load_pair(context: ssl.SSLContext, tls: TlsFiles) -> None:
    def no_password() -> str:
        raise InputError(f"the key {tls.key} is encrypted: gRPC cannot read it, give one without a pass phrase")

    if tls.certificate is None:
        return
    pem_content(tls.certificate)
    pem_content(tls.key, PRIVATE_KEY)
    try:
        context.load_cert_chain(tls.certificate, tls.key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"the key {tls.key} does not belong to the certificate {tls.certificate}") from error
        raise InputError(f"{tls.certificate} and {tls.key} cannot be read as PEM: {error.reason or error}") from error


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> Any:
    """Run a TLS handshake in memory. Return the certificate that the client, or else the server, has verified."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for end in ends * 3:  # each needs at most three turns
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[0].getpeercert() or ends[1].getpeercert()


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
