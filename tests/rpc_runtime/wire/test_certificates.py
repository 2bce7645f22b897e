"""Problems of certificates are reported: by the worker when it starts, and by its callers when they are rejected."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import InputError, WorkerUnavailableError
from rpc_runtime.wire.certificates import WARNING_DAYS, WorkerCertificates, tls_refusal
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles
from tests.helpers.rpc_runtime.certificates import Authority, make_authority, worker_arguments
from tests.helpers.rpc_runtime.worker_process import Start, ready
from tests.helpers.waiting import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("foreign"), "foreign")


def refuses(address: str, tls: TlsFiles | None, words: str) -> None:
    """Check the message that a client gets."""
    with pytest.raises(WorkerUnavailableError, match=f"machine 'box' at {address} cannot be reached: .*{words}"):
        describe(WorkerEndpoint("box", address, "abc", tls), PATIENCE_SECONDS)


def test_a_client_is_told_what_is_wrong_with_its_own_certificate(
    start: Start, lab: Authority, foreign: Authority
) -> None:
    address = ready(start(*worker_arguments(lab.files("box"), mutual=True)))
    client_files = lab.files("me")
    assert describe(WorkerEndpoint("box", address, None, client_files), PATIENCE_SECONDS).secure
    assert tls_refusal(address, client_files) is None
    refuses("127.0.0.1:9", client_files, "Is its worker running?")
    for files, words in (
        (TlsFiles(lab.certificate), "it asks its callers for a certificate"),
        (
            replace(foreign.files("stranger"), authority=lab.certificate),
            "does not accept the certificate .*stranger.pem",
        ),
        (lab.files("old", days=-1), "the certificate .*old.pem has expired"),
        (
            replace(client_files, key=lab.files("other").key),
            "the key .*other.key does not belong to the certificate .*me.pem",
        ),
        (lab.files("serving", usage="serverAuth"), "serving.pem cannot be used by a caller: unsuitable .* purpose"),
        (replace(client_files, authority=None), "not signed by an authority that this system knows"),
        (None, "it speaks TLS, and this call does not"),
    ):
        refuses(address, files, words)


def test_a_client_is_told_what_is_wrong_with_the_worker_s_certificate(
    start: Start, lab: Authority, foreign: Authority
) -> None:
    address = ready(start(*worker_arguments(lab.files("box"), mutual=False)))
    refuses(address, TlsFiles(foreign.certificate), "not signed by the authority in .*foreign.pem")
    elsewhere = ready(start(*worker_arguments(lab.files("far", names="DNS:far.lab.example"), mutual=False)))
    for name in ("127.0.0.1", "localhost"):
        refuses(f"{name}:{elsewhere.rpartition(':')[2]}", TlsFiles(lab.certificate), f"not for the host '{name}'")
    plain = ready(start("--json", TVM_SPLIT_TOKEN="abc"))
    refuses(plain, TlsFiles(lab.certificate), "it does not speak TLS, and this call does")


def test_a_certificate_that_expires_while_the_worker_runs(start: Start, lab: Authority) -> None:
    """An expired certificate of a worker, as its callers see it."""
    old = lab.files("aging", days=-1)
    server = subprocess.Popen(
        ["openssl", "s_server", "-accept", "127.0.0.1:0", "-cert", str(old.certificate), "-key", str(old.key)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("ACCEPT"))
        refuses(line.split()[1], TlsFiles(lab.certificate), "its certificate has expired")
    finally:
        server.kill()
        server.communicate()


def test_a_worker_does_not_start_with_files_that_nobody_would_accept(
    start: Start, lab: Authority, tmp_path: Path
) -> None:
    good, another = lab.files("good"), lab.files("another")
    encrypted, text = tmp_path / "encrypted.key", tmp_path / "text.pem"
    subprocess.run(
        ["openssl", "ec", "-in", str(good.key), "-aes256", "-passout", "pass:secret", "-out", str(encrypted)],
        check=True,
        capture_output=True,
    )
    text.write_text("no certificate")
    damaged = tmp_path / "damaged.pem"
    assert good.certificate is not None
    damaged.write_text(good.certificate.read_text().replace("M", "N"))
    for files, words in (
        (lab.files("old", days=-1), "old.pem has expired"),
        (replace(good, key=another.key), "another.key does not belong to the certificate"),
        (replace(good, key=text), "text.pem holds no private key in PEM"),
        (replace(good, key=encrypted), "encrypted.key is encrypted"),
        (replace(good, certificate=damaged), "cannot be read as PEM"),
        (replace(good, authority=make_authority(tmp_path, "ended", days=-1).certificate), "ended.pem expired on 20"),
        (lab.files("caller", usage="clientAuth"), "cannot be used by a worker: unsuitable certificate purpose"),
    ):
        with pytest.raises(InputError, match=words):
            WorkerCertificates(files)
    process = start(*worker_arguments(replace(good, certificate=text), mutual=True))
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2
    assert errors == f"error: {text} holds no certificate in PEM\n"


def test_a_worker_warns_of_what_expires_soon(start: Start, lab: Authority) -> None:
    process = start(*worker_arguments(lab.files("soon", days=3), mutual=True))
    ready(process)
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "warning: " in errors
    assert "soon.pem expires on 20" in errors
    assert "in 3 days" in errors
    process = start(*worker_arguments(lab.files("later", days=WARNING_DAYS + 2), mutual=True))
    ready(process)
    process.terminate()
    assert process.communicate(timeout=PATIENCE_SECONDS)[1] == ""
