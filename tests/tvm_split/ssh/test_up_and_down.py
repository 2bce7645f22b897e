"""``up`` and ``down`` with a real sshd on loopback: started workers answer, and no process is ever left."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import DeadlineError, WorkerError, WorkerUnavailableError
from rpc_runtime.wire.security import Token, new_token
from rpc_runtime.wire.tokens import token_line
from tests.helpers.rpc_lab import free_port
from tests.helpers.ssh_server import SshServer, require_ssh
from tests.helpers.waiting import PATIENCE_SECONDS, eventually, wait_while_running
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.machine_targets import require_fit
from tvm_split.errors import ClusterError
from tvm_split.ssh import ssh_worker
from tvm_split.ssh.ssh_cluster import SshCluster, stop_workers
from tvm_split.ssh.ssh_worker import SSH_VARIABLE, Kits, SshWorker

TOKEN = "open-sesame"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    folder = tmp_path / "sshd"
    folder.mkdir()
    with SshServer(folder) as started:
        monkeypatch.setenv(SSH_VARIABLE, started.command)
        yield started


@pytest.fixture
def this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces ssh: this host's ``shell`` is the login shell, with further variables."""

    def replace(shell: str = "sh", **environment: str) -> None:
        pairs = " ".join(f"{name}={value}" for name, value in environment.items())
        run = f'for command; do :; done; echo "$command" >{tmp_path}/command; {pairs} exec {shell} -c "$command"'
        (tmp_path / "ssh").write_text(f"{run}\n")
        monkeypatch.setenv(SSH_VARIABLE, f"sh {tmp_path}/ssh")

    return replace


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder below which machines install. At the end, no process that uses it runs."""
    yield tmp_path / "remote"
    eventually(lambda: not processes_in(tmp_path / "remote"), "no process of a machine is left")


def processes_in(folder: Path) -> list[str]:
    lines = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if f"{folder}/" in line and process.pid != os.getpid():
            lines.append(line)
    return lines


def cluster_file(folder: Path, **machines: dict[str, Any]) -> Path:
    """Write a file of machines with a token; the arguments are their ``ssh``."""
    (folder / "token").write_text(TOKEN)
    path = folder / "cluster.yaml"
    listed = [
        {"name": name, "address": f"127.0.0.1:{free_port()}", "token_file": "token", "ssh": ssh}
        for name, ssh in machines.items()
    ]
    path.write_text(yaml.safe_dump({"machines": listed}))
    return path


def on_box(remote: Path, **more: Any) -> dict[str, Any]:
    return {"to": "box", "python": sys.executable, "folder": str(remote), **more}


def ignore(machine: str, text: str) -> None:
    """Ignore the line."""


def start_up(path: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from tvm_split.__main__ import main; main()", "up", str(path), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_up_answers_and_ends_with_ctrl_c(server: SshServer, remote: Path, tmp_path: Path) -> None:
    path = cluster_file(tmp_path, box=on_box(remote), **{"box 2": on_box(remote)})
    cluster = Cluster.from_yaml(path)
    process = start_up(path)
    try:
        lines = [process.stdout.readline() for _ in range(2)] if process.stdout else []
        assert sorted(line.split(": answers at ")[0] for line in lines) == ["box", "box 2"], process.communicate()
        assert sorted(describe(endpoint, 60).machine for endpoint in cluster.start().endpoints().values()) == [
            "box",
            "box 2",
        ]
        assert len(processes_in(remote)) >= 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, "Traceback" in errors) == (130, False), errors
    finally:
        process.kill()
        process.communicate()
    eventually(lambda: not processes_in(remote), "no process of a machine is left")
    assert not list(remote.glob("*/process"))
    assert TOKEN not in "".join(file.read_text() for file in remote.glob("*/log"))


def test_detached_until_down(server: SshServer, remote: Path, tmp_path: Path) -> None:
    path = cluster_file(tmp_path, **{"-x": on_box(remote)})
    cluster = Cluster.from_yaml(path)
    messages: list[str] = []
    with SshCluster(cluster, require_fit, lambda machine, text: messages.append(f"{machine}: {text}"), detach=True):
        pass
    try:
        (endpoint,) = cluster.start().endpoints().values()
        process = describe(endpoint, PATIENCE_SECONDS).process_id
        assert f"(process {process} there)" in messages[-1]
        for options in ((), ("--detach",)):
            again = start_up(path, *options)
            output, errors = again.communicate(timeout=PATIENCE_SECONDS)
            assert (again.returncode, output.startswith("-x: runs already, and answers at")) == (0, True), errors
            assert describe(endpoint, PATIENCE_SECONDS).process_id == process
    finally:
        ended = stop_workers(cluster, remove=True)
    assert ended == {"-x": process}
    assert not list(remote.iterdir())
    assert stop_workers(cluster, remove=False) == {"-x": 0}


def test_up_copies_certificates_and_tokens_and_renews_them(this_host, remote: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="makes certificates")
    from rpc_runtime.wire.authority import certify

    this_host()
    lab, token = tmp_path / "lab", Token(TOKEN)

    def renew(days: int, name: str) -> None:
        certify(lab, "box", ["127.0.0.1"], timedelta(days))
        (tmp_path / "tokens").write_text(f"{token_line('alice', 'deploy', token)}\n{token_line(name, 'deploy', new)}")

    new = new_token()
    renew(40, "bob")
    certify(lab, "me", [], timedelta(40))
    files = {"tls_ca": "lab/lab-ca.pem", "tls_certificate": "lab/box.pem", "tls_key": "lab/box.key", "tokens": "tokens"}
    path = cluster_file(tmp_path, box=on_box(remote, files=files))
    document = yaml.safe_load(path.read_text())
    document["machines"][0]["tls"] = {"ca": "lab/lab-ca.pem", "certificate": "lab/me.pem", "key": "lab/me.key"}
    path.write_text(yaml.safe_dump(document))
    cluster = Cluster.from_yaml(path)
    SshCluster(cluster, require_fit, ignore, detach=True)
    try:
        (endpoint,) = cluster.start().endpoints().values()
        first = describe(endpoint, PATIENCE_SECONDS)
        assert {file.stat().st_mode & 0o777 for file in remote.glob("box-*/t*") if file.is_file()} == {0o600}
        new = new_token()
        renew(80, "carol")
        SshCluster(cluster, require_fit, ignore, detach=True)
        second = describe(replace(endpoint, token=new.text), PATIENCE_SECONDS)
        assert second.process_id == first.process_id
        assert second.certificate_expires > first.certificate_expires
        (lab / "box.key").unlink()
        with pytest.raises(OSError, match=r"No such file.*box\.key"):
            SshCluster(cluster, require_fit, ignore, detach=True)
    finally:
        stop_workers(cluster, remove=True)


@pytest.mark.parametrize("moment", ["one starts", "one has been left alone"])
def test_down_ends_what_a_killed_up_detach_left(server, remote: Path, tmp_path: Path, moment: str) -> None:
    """It is killed while another machine, which waits until a file is removed, has not answered yet."""
    busy, slow = tmp_path / "busy", tmp_path / "python"
    busy.touch()
    slow.write_text(f'#!/bin/sh\nwhile [ -e {busy} ]; do sleep 0.1; done\nexec {sys.executable} "$@"\n')
    slow.chmod(0o700)
    path = cluster_file(tmp_path, box=on_box(remote), other=on_box(remote, python=str(slow)))
    cluster = Cluster.from_yaml(path)
    process = start_up(path, "--detach")
    worker = 0
    try:
        if moment == "one starts":
            wait_while_running(process, lambda: any("rpc_runtime.worker" in line for line in processes_in(remote)))
        else:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("box: answers at")
            worker = describe(cluster.machine("box").endpoint, PATIENCE_SECONDS).process_id
            eventually(lambda: psutil.Process(worker).ppid() in (0, 1), "the worker is left alone")
    finally:
        process.kill()
        process.communicate()
        busy.unlink()
        ended = stop_workers(cluster, remove=True)
    assert ended == {"box": worker or ended["box"], "other": 0}  # a worker that is starting may have ended, or not
    eventually(lambda: not processes_in(remote), "no process of a machine is left")


def test_a_client_that_is_killed_leaves_nothing(server: SshServer, remote: Path, tmp_path: Path) -> None:
    process = start_up(cluster_file(tmp_path, box=on_box(remote)))
    try:
        assert process.stdout is not None
        assert "answers at" in process.stdout.readline()
        for child in psutil.Process(process.pid).children():
            child.kill()  # as if the connection was cut: ssh would end with its client only when it notices that
    finally:
        process.kill()
        process.communicate()
    eventually(lambda: not processes_in(remote), "no process of a machine is left")


def test_down_ends_those_that_it_reaches(server: SshServer, remote: Path, tmp_path: Path) -> None:
    """The others are all named."""
    path = cluster_file(tmp_path, box=on_box(remote))
    with SshCluster(Cluster.from_yaml(path), require_fit, ignore, detach=True):
        pass
    document = yaml.safe_load(path.read_text())
    (box,) = document["machines"]
    stranger = {"ssh": box["ssh"] | {"to": "stranger"}}
    lost = [box | stranger | {"name": name, "address": f"127.0.0.1:{free_port()}"} for name in ("other", "third")]
    path.write_text(yaml.safe_dump({"machines": [*lost, box]}))
    with pytest.raises(WorkerUnavailableError, match=r"(?s)machine 'other'.*denied.*machine 'third'.*denied"):
        stop_workers(Cluster.from_yaml(path), remove=True)
    assert not list(remote.iterdir())


def test_one_that_fails_ends_the_others(server: SshServer, remote: Path, tmp_path: Path) -> None:
    stranger = on_box(remote) | {"to": "stranger"}
    path = cluster_file(tmp_path, box=on_box(remote), other=stranger, third=stranger)
    for detach in (False, True):
        message = r"(?s)machine 'other' \(ssh stranger\) cannot be reached.*denied.*machine 'third'"
        with pytest.raises(WorkerUnavailableError, match=message):
            SshCluster(Cluster.from_yaml(path), require_fit, ignore, detach)
        eventually(lambda: not processes_in(remote), "no process of a machine is left")


@pytest.mark.parametrize(
    ("ssh", "message"),
    [
        ({"python": "no-such-python"}, "no-such-python ended with 127: .*not found"),
        ({"arguments": ["--cores", "4096"]}, "ended with exit code 2 while it started.*--cores"),
        ({"folder": "/dev/null/here"}, "/dev/null"),
        ({"folder": "~nosuchuser/x"}, "there is no folder '~nosuchuser/x.*Name one with folder: in the cluster file$"),
        ({"folder": "\udcff\ud800"}, r"there is no folder .*surrogates not allowed"),
    ],
)
def test_what_the_machine_refuses(server, remote, tmp_path, ssh: dict[str, Any], message: str) -> None:
    cluster = Cluster.from_yaml(cluster_file(tmp_path, box=on_box(remote) | ssh))
    with pytest.raises(WorkerError, match=rf"(?s)machine 'box' \(ssh box\).*{message}"):
        SshCluster(cluster, require_fit, ignore)


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "tcsh", "fish"])
def test_every_login_shell_reads_the_command(this_host, remote: Path, tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    this_host(shell)
    cluster = Cluster.from_yaml(cluster_file(tmp_path, box=on_box(remote)))
    assert stop_workers(cluster, remove=False) == {"box": 0}
    assert re.fullmatch(r"[-/.\w]+ -c '[ ;.()\w]+'\n", (tmp_path / "command").read_text())


def test_a_python_without_a_filter_for_tar_files(this_host, remote: Path, tmp_path: Path) -> None:
    """Python 3.11 has it since 3.11.4."""
    (tmp_path / "sitecustomize.py").write_text(
        "import tarfile\ndef extract(self, path='.', members=None, *, numeric_owner=False):\n"
        "    raise NotImplementedError\ntarfile.TarFile.extractall = extract\n"
    )
    this_host(PYTHONPATH=f"{tmp_path}:{Path(ssh_worker.__file__).parents[2]}")
    with SshCluster(Cluster.from_yaml(cluster_file(tmp_path, box=on_box(remote))), require_fit, ignore) as cluster:
        assert len(cluster.started) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../../evil", tarfile.REGTYPE),
        ("kit/../../../evil", tarfile.REGTYPE),
        ("/{}/evil", tarfile.REGTYPE),
        ("kit/evil", tarfile.SYMTYPE),
        ("kit/evil", tarfile.LNKTYPE),
        ("kit/evil", tarfile.FIFOTYPE),
    ],
)
def test_a_kit_is_written_to_its_folder_only(tmp_path: Path, name: str, kind: bytes) -> None:
    entry = tarfile.TarInfo(name.format(tmp_path))
    entry.type, entry.linkname = kind, "/etc/passwd"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as written:
        written.addfile(entry)
    about = {"arguments": [], "token": "", "tokens": "", "detach": False, "digest": "1", "needs": {}}
    request = json.dumps({"do": "up", "folder": str(tmp_path / "box"), **about})
    content = f"{request}\n{len(packed.getvalue())}\n".encode() + packed.getvalue()
    command = [sys.executable, "-m", "tvm_split.ssh.remote_side"]
    output = subprocess.run(command, input=content, capture_output=True, timeout=PATIENCE_SECONDS).stdout.decode()
    assert "no plain file of its folder" in output
    assert not [path for path in tmp_path.rglob("*") if path.name in ("evil", "kit-1", "own-1")]


def test_a_token_that_could_not_be_found_is_missed_before_anything_is_sent(this_host, remote, tmp_path) -> None:
    this_host(HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path / "state"))
    path = cluster_file(tmp_path, box=on_box(remote))
    path.write_text(path.read_text().replace("token_file: token", ""))
    with pytest.raises(WorkerError, match=rf"machine 'box'.*in \S+:{tmp_path}/state, .* token_file: in the cluster"):
        SshCluster(Cluster.from_yaml(path), require_fit, ignore)
    assert not list(remote.glob("*/*-*"))


def test_a_folder_that_others_may_write_to(tmp_path: Path, shared: Path, this_host: Callable[..., None]) -> None:
    """Another user could have put code there that the worker would run."""
    this_host()
    cluster = Cluster.from_yaml(cluster_file(tmp_path, box=on_box(shared / "ssh")))
    with SshCluster(cluster, require_fit, ignore):
        pass
    shared.chmod(0o777)
    with pytest.raises(WorkerError, match=f"machine 'box'.*{shared}"):
        SshCluster(cluster, require_fit, ignore)


def test_a_worker_that_is_not_the_one_that_is_meant(server, remote, tmp_path) -> None:
    """The error is that of `status`; the worker has ended."""
    path = cluster_file(tmp_path, box=on_box(remote, arguments=["--name=other"]))
    messages: list[str] = []
    with pytest.raises(ClusterError, match=r"machine 'box'.*is 'other'"):
        SshCluster(Cluster.from_yaml(path), require_fit, lambda machine, text: messages.append(text))
    assert not any("answers at" in line for line in messages)
    eventually(lambda: not processes_in(remote), "no process of a machine is left")


def test_a_host_that_does_not_answer(remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and does not answer."""
    require_ssh()
    monkeypatch.setattr(ssh_worker, "CONNECT_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(SSH_VARIABLE, f"ssh -F /dev/null -p {silent.getsockname()[1]}")
        cluster = Cluster.from_yaml(cluster_file(tmp_path, box=on_box(remote) | {"to": "127.0.0.1"}))
        with pytest.raises(WorkerUnavailableError, match=r"cannot be reached: .*timed out"):
            SshCluster(cluster, require_fit, ignore)


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("'", ClusterError, r'\$TVM_SPLIT_SSH is "\'", which cannot be read as a shell does: no closing quotation'),
        ("no-such-ssh -p 22", WorkerUnavailableError, "cannot run no-such-ssh: No such file"),
    ],
)
def test_a_command_that_is_none(remote, tmp_path, monkeypatch, command: str, error: type, message: str) -> None:
    monkeypatch.setenv(SSH_VARIABLE, command)
    cluster = Cluster.from_yaml(cluster_file(tmp_path, box=on_box(remote)))
    with pytest.raises(error, match=message):
        SshCluster(cluster, require_fit, ignore)
    with pytest.raises(error, match=message):
        stop_workers(cluster, remove=False)


def test_a_machine_that_says_nothing(server, remote, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ssh_worker, "ANSWER_SECONDS", 1.0)
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 30\n")
    sleeper.chmod(0o700)
    cluster = Cluster.from_yaml(cluster_file(tmp_path, box=on_box(remote, python=str(sleeper))))
    (machine,) = cluster.machines
    with SshWorker(machine, ignore) as worker, pytest.raises(DeadlineError, match="said nothing for 1 s"):
        worker.start(Kits(), detach=False)


@pytest.mark.slow
def test_a_python_without_packages_gets_them_in_a_kit(server: SshServer, remote: Path, tmp_path: Path) -> None:
    bare = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
    cluster = Cluster.from_yaml(cluster_file(tmp_path, box=on_box(remote, python=str(bare))))
    for is_first in (True, False):
        messages: list[str] = []
        with SshCluster(cluster, require_fit, lambda machine, text, messages=messages: messages.append(text)):
            (endpoint,) = cluster.start().endpoints().values()
            assert describe(endpoint, PATIENCE_SECONDS).tvm_version
        assert any("gets a worker" in line for line in messages) == is_first
    assert len(list(remote.glob("*/kit-*/packages/tvm"))) == 1
