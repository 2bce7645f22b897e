"""Which callers a worker accepts: by its options, by its own token, and its warnings."""

import os
import signal
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerClient, describe
from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.events import COMPUTE
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles, find_token
from tests.helpers.rpc_runtime.certificates import make_authority, worker_arguments
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, one_stage, skips
from tests.helpers.rpc_runtime.worker_process import STATE_VARIABLE, Start, announced, ready
from tests.helpers.waiting import PATIENCE_SECONDS


def test_a_pipeline_over_tls(start: Start, tmp_path: Path, maker: ProgramMaker) -> None:
    """Client and workers, and workers among each other, authenticate; each worker has its own token."""
    lab = make_authority(tmp_path)
    client_files, endpoints = lab.files("me"), {}
    for name in (A, B, C):
        arguments = worker_arguments(lab.files(name), mutual=True)
        process = start(*arguments, "--name", name, TVM_SPLIT_TOKEN=f"token-{name}")
        endpoints[name] = WorkerEndpoint(name, ready(process), f"token-{name}", client_files)
    program = skips(maker)
    with Session(Opening(program, endpoints, maker.blob_path)) as pipeline:
        assert len(list(pipeline.stream(batches_for(program, 10)))) == 10
    for tls in (None, TlsFiles(authority=lab.certificate)):
        with pytest.raises(WorkerUnavailableError):
            describe(WorkerEndpoint(A, endpoints[A].address, f"token-{A}", tls), PATIENCE_SECONDS)


def ended_with(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, errors


def test_a_certificate_of_its_own_does_not_open_a_worker_to_the_network(start: Start, tmp_path: Path) -> None:
    """The certificate authenticates the worker, not its callers."""
    files = make_authority(tmp_path).files("box")
    alone = ["--listen", "0.0.0.0:0", *worker_arguments(files, mutual=False)]
    code, errors = ended_with(start(*alone))
    assert code == 2
    assert "give --tls-ca or --token-file, or --insecure" in errors
    assert errors.count("\n") == 1
    process = start(*alone, "--insecure")
    ready(process)
    process.terminate()
    assert "warning: listening on 0.0.0.0:0 without --tls-ca or a token: anybody who" in ended_with(process)[1]
    for authentication in (["--tls-ca", str(files.authority)], ["--token-file", str(tmp_path / "token")]):
        (tmp_path / "token").write_text("open-sesame")
        process = start(*alone, *authentication)
        ready(process)
        process.terminate()
        assert ended_with(process) == (0, "")


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_a_worker_on_loopback_serves_its_own_user_only(start: Start, tmp_path: Path, listen: str) -> None:
    process = start("--listen", listen, "--json", XDG_STATE_HOME=os.environ[STATE_VARIABLE])
    ready = announced(process)
    address, file = str(ready["address"]), Path(str(ready["token_file"]))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert describe(WorkerEndpoint("x", address), PATIENCE_SECONDS).process_id == process.pid  # no token was configured
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_VARIABLE, str(tmp_path / "another user's"))
        with pytest.raises(WorkerError, match="the token is wrong or missing"):
            describe(WorkerEndpoint("x", address), PATIENCE_SECONDS)
    with pytest.raises(WorkerError, match="the token is wrong or missing"):
        describe(WorkerEndpoint("x", address, "guessed"), PATIENCE_SECONDS)
    process.terminate()
    assert ended_with(process) == (0, "")
    assert not file.exists()


@pytest.mark.parametrize("token", [None, "open-sesame"])
def test_whoever_has_the_port_of_the_other_loopback_address_learns_nothing(start: Start, token: str | None) -> None:
    """``localhost`` is two addresses, and another user may listen on the one that the worker does not use."""
    seen: list[str] = []

    class Listener(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> None:
            seen.extend(key for key, _ in details.invocation_metadata)

    variables = {} if token is None else {"TVM_SPLIT_TOKEN": token}
    stranger = grpc.server(ThreadPoolExecutor(1), handlers=(Listener(),))
    port = stranger.add_insecure_port("[::1]:0")
    stranger.start()
    try:
        process = start("--listen", f"localhost:{port}", "--json", **variables)
        assert ready(process) == f"127.0.0.1:{port}"
        assert describe(WorkerEndpoint("x", f"localhost:{port}", token), PATIENCE_SECONDS).process_id == process.pid
        with pytest.raises(ProtocolError, match="not a worker"):
            describe(WorkerEndpoint("x", f"[::1]:{port}"), PATIENCE_SECONDS)
        assert seen
        assert "authorization" not in seen
    finally:
        stranger.stop(None)


def test_the_announcement_says_where_the_token_is_and_not_what_it_is(start: Start) -> None:
    for arguments, variables, words in (
        ([], {}, f"token in {os.environ[STATE_VARIABLE]}"),
        ([], {"TVM_SPLIT_TOKEN": "open-sesame"}, "token from $TVM_SPLIT_TOKEN,"),
        (["--insecure"], {}, "no token,"),
    ):
        process = start(*arguments, **variables)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert words in line
        secret = find_token(line.split(" listens on ")[1].split()[0])
        process.send_signal(signal.SIGINT)
        _, errors = ended_with(process)
        for text in (line, errors):
            assert "open-sesame" not in text
            assert secret is None or secret.text not in text
        assert ("every user of this host controls this machine" in errors) == ("--insecure" in arguments)


def test_a_token_is_of_one_worker_and_goes_with_one_that_was_killed(start: Start) -> None:
    process, second_process = start("--json"), start("--json")
    address = ready(process)
    first, second = find_token(address), find_token(ready(second_process))
    assert first is not None
    assert second is not None
    for killed in (process, second_process):
        killed.kill()
        killed.wait()
    assert first.file is not None
    assert first.file.exists()
    assert find_token(address) is None
    assert not first.file.exists()
    again = start("--listen", address, "--json")
    ready(again)
    assert second.file is not None
    assert not second.file.exists()  # no client had looked it up
    assert first.file.exists()
    assert describe(WorkerEndpoint("x", address), PATIENCE_SECONDS).process_id == again.pid
    with pytest.raises(WorkerError, match="the token is wrong"):
        describe(WorkerEndpoint("x", address, first.text), PATIENCE_SECONDS)


def test_a_bystander_with_the_token_observes_by_the_letters_that_are_shown(start: Start, maker: ProgramMaker) -> None:
    endpoint = WorkerEndpoint(A, ready(start("--json", "--name", A, TVM_SPLIT_TOKEN="open-sesame")), "open-sesame")
    program = one_stage(maker)
    said = b'{"stages": []}'
    with Session(Opening(program, {A: endpoint}, maker.blob_path, about=lambda program: said)) as pipeline:
        list(pipeline.stream(batches_for(program, 5)))
        (held,) = describe(endpoint, PATIENCE_SECONDS).deployments
        bystander = WorkerClient(endpoint, held.name)
        seen = bystander.observe(PATIENCE_SECONDS, since=0)
        own = pipeline.observe({})[A]
        assert bystander.about(PATIENCE_SECONDS) == said
        bystander.close()
        assert [(track.kind, track.stage) for track in seen.tracks] == [(t.kind, t.stage) for t in own.tracks]
        assert sum(track.events for track in seen.tracks if track.kind == COMPUTE) == 5
        with pytest.raises(ProtocolError, match="at most 1000 micro-batches, not 1001"):
            pipeline.observe(kernels=1001)
        stranger = WorkerClient(replace(endpoint, token="another"), held.name)
        with pytest.raises(WorkerError, match="token"):
            stranger.observe(PATIENCE_SECONDS)
        stranger.close()
    for wrong, reason in ((b" " * 65537, "65537 bytes"), (b"[]", "no JSON object"), (b"[" * 65536, "no JSON object")):
        with pytest.raises(TvmSplitError, match=reason):
            Session(Opening(program, {A: endpoint}, maker.blob_path, about=lambda program, wrong=wrong: wrong))
