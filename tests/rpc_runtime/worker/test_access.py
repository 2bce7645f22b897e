"""Who may do what on a worker: strangers, roles, revoked tokens and expired certificates, and the log of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerClient, describe
from rpc_runtime.errors import (
    AccessError,
    InputError,
    TvmSplitError,
    WorkerError,
    WorkerUnavailableError,
)
from rpc_runtime.wire.certificates import WARNING_DAYS
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles, Token, new_token
from rpc_runtime.wire.tokens import Tokens, token_line
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, one_stage
from tests.helpers.rpc_runtime.raw_calls import METHODS, RawCaller
from tests.helpers.rpc_runtime.worker_process import ROOT, Start, ready
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

pytest.importorskip("cryptography", reason="makes certificates")

from rpc_runtime.wire.authority import certify


class Lab:
    """The tokens and certificates of a lab, in a folder, and its worker's options for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokens, self.audit = folder / "lab", folder / "tokens", folder / "audit"
        self.secrets: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        self.host = self.files(A, "localhost", "127.0.0.1")

    def files(self, name: str, *addresses: str, seconds: float = 86400 * 60) -> TlsFiles:
        pem = certify(self.folder, name, addresses, timedelta(seconds=seconds))
        return TlsFiles(self.folder / "lab-ca.pem", pem, pem.with_suffix(".key"))

    def allow(self, **roles: str) -> None:
        for name, role in roles.items():
            token = new_token()
            self.secrets[name], self.lines[name] = token.text, token_line(name, role, token)
        self.write()

    def revoke(self, name: str) -> None:
        del self.lines[name]
        self.write()

    def write(self) -> None:
        self.tokens.with_suffix(".new").write_text("# the lab\n\n" + "\n".join(self.lines.values()))
        self.tokens.with_suffix(".new").replace(self.tokens)

    @property
    def arguments(self) -> list[str]:
        tls = ["--tls-certificate", self.host.certificate, "--tls-key", self.host.key, "--tls-ca", self.host.authority]
        return ["--json", "--name", A, "--tokens", str(self.tokens), "--audit", str(self.audit), *map(str, tls)]

    def audited(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_who_is_refused_while_the_deployment_of_somebody_else_goes_on(
    start: Start, lab: Lab, maker: ProgramMaker
) -> None:
    lab.allow(alice="deploy", bob="observe", carol="deploy", dave="deploy")
    address, people = ready(start(*lab.arguments)), lab.files("person")
    ends = {name: WorkerEndpoint(A, address, token, people) for name, token in lab.secrets.items()}
    program = one_stage(maker)
    batches = batches_for(program, 12)

    def deploy(name: str) -> Session:
        return Session(Opening(program, {A: ends[name]}, maker.blob_path, model=f"net of {name}"))

    with deploy("alice") as pipeline:
        results = pipeline.stream(batches)
        seen = [next(results)]

        def refused(kind: type[TvmSplitError], words: str, act: Callable[[], object]) -> None:
            with pytest.raises(kind, match=words):
                act()
            seen.append(next(results))

        stranger = WorkerEndpoint(A, address, "guessed", people)
        refused(AccessError, "the token is wrong or missing", lambda: describe(stranger, PATIENCE_SECONDS))
        without = WorkerEndpoint(A, address, lab.secrets["alice"], TlsFiles(lab.host.authority))
        refused(WorkerUnavailableError, "asks its callers for a certif", lambda: describe(without, PATIENCE_SECONDS))
        (held,) = describe(ends["bob"], PATIENCE_SECONDS).deployments
        with closing(WorkerClient(ends["bob"], held.name)) as observer:
            assert observer.observe(PATIENCE_SECONDS, since=0).tracks
            refused(AccessError, "'bob' may observe only: ask", lambda: observer.unload(PATIENCE_SECONDS))
            refused(AccessError, "'bob' may observe only: ask", lambda: observer.drain(True, PATIENCE_SECONDS))
        refused(WorkerError, "'bob' may observe only: ask", lambda: deploy("bob"))
        # Who may deploy cannot end what others have deployed: the letters that are shown are not its name.
        with closing(WorkerClient(ends["dave"], held.name)) as other:
            other.unload(PATIENCE_SECONDS)
            other.drain(False, PATIENCE_SECONDS)
        seen.append(next(results))
        with deploy("carol") as second:
            assert len(list(second.stream(batches))) == len(batches)
            lab.revoke("carol")
            refused(AccessError, "token of 'carol' was revoked", lambda: describe(ends["carol"], PATIENCE_SECONDS))
            eventually(lambda: len(describe(ends["bob"], 60).deployments) == 1, "the deployment of carol ends")
            refused(TvmSplitError, "token of 'carol' was revoked", lambda: list(second.stream(batches)))
        with closing(expiring_client(lab, ends["dave"])) as client:
            is_refused = lambda: "the caller's certificate has expired: get" in reason(client)  # noqa: E731
            eventually(is_refused, "the certificate expires")
            again = client.endpoint
        refused(WorkerUnavailableError, "expiring.pem has expired", lambda: describe(again, PATIENCE_SECONDS))
        seen += results
    for (result,), (x,) in zip(seen, batches, strict=True):
        np.testing.assert_array_equal(result, x + x)
    lines = lab.audited()
    assert [line["caller"] for line in lines if line.get("model") == "net of alice"] == ["alice", "alice"]
    told = {(line["result"], line["method"], line["caller"]): line.get("reason", "") for line in lines}
    for method, caller, words in (
        ("Describe", "person", "the token is wrong or missing"),
        ("Watch", "bob", "may observe only"),
        ("Unload", "bob", "may observe only"),
        ("Drain", "bob", "may observe only"),
        ("Describe", "carol", "was revoked"),
        ("Describe", "dave", "certificate has expired"),
    ):
        assert words in told["refused", method, caller]
    assert "was revoked" in told["ended", "Watch", "carol"]
    assert told["ended", "Watch", "alice"] == ""
    assert told["ended", "LoadStages", "alice"] == ""
    assert [line["draining"] for line in lines if line["method"] == "Drain" and line["caller"] == "dave"] == [
        "False"
    ] * 2
    for secret in lab.secrets.values():
        assert secret not in lab.audit.read_text() + lab.tokens.read_text()


def reason(client: WorkerClient) -> str:
    try:
        client.describe(PATIENCE_SECONDS)
    except AccessError as error:
        return str(error)
    return ""


def expiring_client(lab: Lab, endpoint: WorkerEndpoint) -> WorkerClient:
    """Return a client that has called while its certificate was valid, which ends soon."""
    for seconds in (2, 4, 8, 16, 32, 64):  # a busy machine needs longer to call
        tls = lab.files("expiring", seconds=seconds)
        client = WorkerClient(WorkerEndpoint(A, endpoint.address, endpoint.token, tls))
        try:
            client.describe(PATIENCE_SECONDS)
        except TvmSplitError:
            client.close()
        else:
            return client
    raise AssertionError("no call before the certificate expired")


def test_certificates_and_tokens_that_change_while_the_worker_runs(start: Start, lab: Lab, maker: ProgramMaker) -> None:
    """What runs goes on. A change that cannot be used is told once, and changes nothing."""
    lab.allow(alice="deploy")
    lab.host = lab.files(A, "localhost", "127.0.0.1", seconds=86400 * (WARNING_DAYS - 7))
    process = start(*lab.arguments)
    address, people = ready(process), lab.files("person")
    end = WorkerEndpoint(A, address, lab.secrets["alice"], people)
    program = one_stage(maker)
    with Session(Opening(program, {A: end}, maker.blob_path)) as pipeline:
        first = describe(end, PATIENCE_SECONDS).certificate_expires
        lab.files(A, "localhost", "127.0.0.1")
        eventually(lambda: describe(end, PATIENCE_SECONDS).certificate_expires > first, "the new certificate is shown")
        assert lab.host.key is not None
        lab.host.key.write_bytes(people.key.read_bytes() if people.key else b"")  # of another certificate
        lab.tokens.write_text("")  # as an editor does for a moment
        for _ in range(2):
            assert describe(end, PATIENCE_SECONDS).certificate_expires > first
        lab.allow(bob="observe")
        assert describe(WorkerEndpoint(A, address, lab.secrets["bob"], people), PATIENCE_SECONDS)
        with pytest.raises(WorkerUnavailableError, match=r"not signed by the authority in .*other"):
            describe(WorkerEndpoint(A, address, None, Lab(lab.folder.parent / "other").host), PATIENCE_SECONDS)
        assert len(list(pipeline.stream(batches_for(program, 3)))) == 3
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert errors.count("; new connections get the certificate that was read before") == 1
    assert errors.count("holds no token: `tvm-split token NAME --tokens") == 1
    assert f"in {WARNING_DAYS - 7} days: get a new one in time" in errors


def test_a_worker_looks_daily_at_its_certificates(lab: Lab, tmp_path: Path) -> None:
    lab.allow(alice="deploy")
    code = "import sys; from rpc_runtime.worker import process as p; p.CHECK_SECONDS = 0.1; p.main(sys.stdout)"
    command = [sys.executable, "-c", code, "--cache", str(tmp_path / "cache"), *lab.arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        ready(process)
        lab.files(A, "localhost", "127.0.0.1", seconds=86400 * 3.2)
        assert f"{A}.pem expires on 20" in process.stderr.readline()
        process.terminate()


def test_strangers_cannot_fill_the_disk_with_the_log(start: Start, tmp_path: Path) -> None:
    address = ready(start("--json", "--audit", str(tmp_path / "audit"), TVM_SPLIT_TOKEN="open-sesame"))
    with RawCaller(WorkerEndpoint(A, address, "guessed")) as caller:
        for _ in range(3):
            assert caller.codes(METHODS["Watch"].path, [b""] * 1000) == {"UNAUTHENTICATED": 1000}
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert {(line["result"], line["method"], line["caller"]) for line in lines} == {("refused", "Watch", "stranger")}
    assert len(lines) <= 2 * len({line["time"][:19] for line in lines})
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no token: `tvm-split token NAME"),
        ("# nobody\n", "holds no token"),
        ("alice deploy\n", "line 1 of .* is not NAME ROLE SHA256, with the role deploy or observe"),
        ("\nalice root " + "0" * 64, "line 2 of .* is not NAME ROLE"),
        ("alice deploy " + "0" * 63, "line 1 of"),
        ("\udcff", "line 1 of"),
    ],
)
def test_files_of_tokens_that_are_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=words):
        Tokens(file)


def test_a_file_of_tokens_that_every_user_can_write(tmp_path: Path) -> None:
    file, token = tmp_path / "tokens", Token("open-sesame")
    with pytest.raises(InputError, match=r"cannot read the file of tokens .*: No such file"):
        Tokens(file)
    file.write_text(token_line("alice", "observe", token))
    caller = Tokens(file).caller(token.metadata)
    assert caller is not None
    assert (caller.name, caller.role) == ("alice", "observe")
    file.chmod(0o646)
    with pytest.raises(InputError, match=f"every user of this host can write .*{file}: `chmod o-w {file}`"):
        Tokens(file)
    with pytest.raises(InputError, match="1 to 64 letters, digits"):
        token_line("a b", "deploy", token)
