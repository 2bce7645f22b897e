"""Install, start and end one worker on a machine over ssh.

OpenSSH connects with its user's configuration: names, ports, keys, jump hosts. It runs without prompts.
"""

import hashlib
import json
import os
import queue
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpc_runtime import private_folder
from rpc_runtime.errors import DeadlineError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.files import file_bytes, state_folder
from rpc_runtime.processes import Closing, reap
from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.text import cleaned
from tvm_split.cluster.machine import Machine, SshAccess
from tvm_split.errors import ClusterError
from tvm_split.ssh import remote_side
from tvm_split.units import bytes_text
from tvm_split.worker_kit.distributions import Platform, needed_versions
from tvm_split.worker_kit.kit import own_files, pack, write_kit

SSH_VARIABLE = "TVM_SPLIT_SSH"
"""The environment variable with the command, and its options, to run instead of ``ssh``, like GIT_SSH_COMMAND."""
CONNECT_SECONDS = 10
ANSWER_SECONDS = 30.0
"""The time limit for the machine's first answer, and for every answer that needs no long work."""
SEND_SECONDS = 1200.0
SILENT_END_SECONDS = 1.0
"""The time limit for ssh to end if the machine has not answered yet, so that nothing runs there."""
END_SECONDS = remote_side.STOP_SECONDS + 5.0
MOST_LINES_KEPT = 5
_RUN = "import sys; exec(eval(sys.stdin.buffer.raw.readline()))"
"""Runs the program on its input. All login shells read this alike, not what has line breaks, backslashes or `!`."""
_END = None


class Kits:
    """The kits of one `tvm-split up`; each is packed once for all machines with the same platform. Thread-safe.

    ``digest`` identifies the files and package versions of this installation, since worker and client must match.
    ``needs`` are the packages that a worker imports, with their versions here.
    """

    def __init__(self) -> None:
        self.needs = needed_versions()
        digest = hashlib.sha256(repr(sorted(self.needs.items())).encode())
        for name, path in sorted(own_files().items()):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.digest = digest.hexdigest()[:16]
        self._lock = threading.Lock()
        self._packed: dict[object, bytes] = {}

    def packed(self, platform: Platform, device: str, has_packages: bool) -> bytes:
        """Return a gzipped tar file of the folder ``kit``; without packages for a Python that has them.

        Raises:
            KitError: pip cannot download a package for the platform.
        """
        key = "" if has_packages else (platform, device)
        with self._lock:
            if key not in self._packed:
                with ScratchFolder("kit") as folder:
                    packed = folder.path / "kit.tar.gz"
                    if has_packages:
                        pack({f"kit/packages/{name}": path for name, path in own_files().items()}, packed)
                    else:
                        write_kit(packed, device, platform)
                    self._packed[key] = packed.read_bytes()
            return self._packed[key]


class SshWorker(Closing):
    """A connection to one machine and the worker that it starts there. Thread-safe.

    ``on_line`` gets the machine's name and each line of the worker's log.
    """

    def __init__(self, machine: Machine, on_line: Callable[[str, str], None]) -> None:
        if machine.ssh is None or machine.endpoint is None:
            raise ClusterError(f"machine {machine.name!r} has no ssh: in the cluster file, which says how to reach it")
        self.machine = machine
        self._access: SshAccess = machine.ssh
        self.endpoint = machine.endpoint
        self._on_line = on_line
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.ran_before = False
        """Whether `start` met a worker that an earlier `up` started, which `close` leaves running."""
        self._said: list[str] = []
        self._heard = False

    def start(self, kits: Kits, detach: bool) -> int:
        """Start the worker, unless it runs already; return its process number on the machine once it listens.

        Raises:
            WorkerUnavailableError: ssh cannot connect.
            WorkerError: the machine refuses, or starting fails; the message says why.
            DeadlineError: the machine does not answer in time.
            KitError: no worker can be packed for the machine's Python and processor.
        """
        files = {option: file_bytes(path).decode(errors="replace") for option, path in self._access.files.items()}
        self._connect()
        more = {"detach": detach, "digest": kits.digest, "needs": kits.needs, "files": files}
        self._send(self._request("up") | more)
        event = self._next(ANSWER_SECONDS)
        if event.get("event") == "wanted":
            device = "cuda" if self.machine.has_gpu else "cpu"
            major, minor = map(int, event["python"])
            packed = kits.packed(Platform((major, minor), str(event["architecture"])), device, event["has_packages"])
            if not event["has_packages"]:
                self._on_line(self.machine.name, f"gets a worker with its packages ({bytes_text(len(packed))})")
            self._write(f"{len(packed)}\n".encode() + packed)
        if event.get("event") == "running":
            self.ran_before = True
        else:
            event = self._next(remote_side.READY_SECONDS + ANSWER_SECONDS)
        return int(event["pid"])

    def wait(self) -> None:
        """Wait until the worker ends, which is an error: always raises.

        Raises:
            WorkerError: the worker ended.
            WorkerUnavailableError: the connection ended.
        """
        while True:
            self._next(None)

    def stop(self, remove: bool) -> int:
        """End the worker that was started in the machine's folder; with ``remove``, delete the folder too.

        Returns the worker's process number; 0 if none ran.
        """
        self._connect()
        self._send({**self._request("down"), "remove": remove})
        return int(self._next(ANSWER_SECONDS + 2 * remote_side.STOP_SECONDS)["process"])

    def close(self) -> None:
        """End the connection, and with it the worker unless it was detached. May be called again."""
        with self._lock:
            self._closed = True
            process, local_end = self._process, self._socket
        if local_end is not None:
            try:
                local_end.shutdown(socket.SHUT_WR)
            except OSError:
                local_end.close()
        if process is not None:
            try:
                process.wait(END_SECONDS if self._heard else SILENT_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _request(self, do: str) -> dict[str, Any]:
        called = Address.parse(self.endpoint.address)
        everywhere = "::" if ":" in called.host else "0.0.0.0"  # noqa: S104 (the worker asks for TLS there)
        listen = called if called.is_loopback else Address(everywhere, called.port)
        arguments = [f"--name={self.machine.name}", f"--threads={self.machine.threads}", f"--listen={listen}"]
        folder = f"{self._access.folder}/{_folder_name(self.machine.name)}"
        token = self.endpoint.token
        arguments += self._access.arguments
        makes_token = called.is_loopback and not (token or self.endpoint.tls or "--insecure" in arguments)
        tokens = f"{socket.gethostname()}:{(state_folder('') or Path()).parent}" if makes_token else ""
        return {"do": do, "folder": folder, "arguments": arguments, "token": token, "tokens": tokens}

    def _connect(self) -> None:
        command = ssh_command()
        remote = shlex.join([self._access.python, "-c", _RUN])
        settings = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=15")
        options = ["-T", *(f"-o{setting}" for setting in settings)]
        self._socket, remote_end = socket.socketpair()
        with remote_end, self._lock:
            if self._closed:
                raise WorkerUnavailableError("it is ended already")
            try:
                self._process = subprocess.Popen(  # noqa: S603 (no shell here; quoted for the shell there)
                    [*command, *options, "--", self._access.destination, remote],
                    stdin=remote_end.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C goes to this process only, which then ends the worker
                )
            except OSError as error:
                raise WorkerUnavailableError(f"cannot run {command[0]}: {error.strerror}") from error
        reap(self._process)
        threading.Thread(target=self._read_events, args=(self._process.stdout,), daemon=True).start()
        self._write(f"{_script()!a}\n".encode())

    def _read_events(self, pipe: Any) -> None:
        for line in pipe:
            # Before the mark there may be what ssh or a login shell wrote without a line break.
            text, mark, content = line.decode(errors="replace").rstrip().partition(remote_side.MARK)
            if mark:
                try:
                    event = json.loads(content)
                except ValueError:
                    event = {"event": "line", "text": content}
                self._heard = True
                self._events.put(event if isinstance(event, dict) else {})
            if text or not mark:
                self._said = [*self._said[1 - MOST_LINES_KEPT :], cleaned(text)]
        self._events.put(_END)

    def _next(self, seconds: float | None) -> dict[str, Any]:
        """Return the next event within ``seconds``, except lines of the log, which are passed to ``on_line``."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                event = self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DeadlineError(f"{self._where()} said nothing for {seconds:g} s{self._quoted()}") from None
            if event is _END:
                raise self._ended()
            if event.get("event") == "line":
                self._on_line(self.machine.name, cleaned(str(event.get("text", ""))))
            elif event.get("event") == "refused":
                raise WorkerError(f"{self._where()}: {cleaned(str(event.get('text', '')))}{self._quoted()}")
            else:
                return event

    def _ended(self) -> TvmSplitError:
        code = None if self._process is None else self._process.wait()
        if code == 255:  # ssh's code for its own errors
            return WorkerUnavailableError(f"{self._where()} cannot be reached{self._quoted()}")
        return WorkerError(f"{self._where()}: {self._access.python} ended with {code}{self._quoted()}")

    def _send(self, request: dict[str, Any]) -> None:
        self._write(json.dumps(request).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        try:
            if self._socket is not None:
                self._socket.settimeout(SEND_SECONDS)
                self._socket.sendall(data)
        except OSError:
            pass  # the reading threads report why the other side ended

    def _where(self) -> str:
        return f"machine {self.machine.name!r} (ssh {self._access.destination})"

    def _quoted(self) -> str:
        return f": {' / '.join(self._said)}" if self._said else ""


def _script() -> str:
    """Return `remote_side` as a program, with the one module of this project that it imports."""
    module = private_folder.__name__
    sent, main = (Path(str(part.__file__)).read_text(encoding="utf-8") for part in (private_folder, remote_side))
    return (
        f"import sys, types\nmodule = sys.modules[{module!r}] = types.ModuleType({module!r})\n"
        f"exec({sent!r}, vars(module))\nexec({main!r})\n"
    )


def ssh_command() -> list[str]:
    """Return the ssh command with its options. Raises ClusterError if `SSH_VARIABLE` is no valid shell line."""
    line = os.environ.get(SSH_VARIABLE, "")
    try:
        return shlex.split(line) or ["ssh"]
    except ValueError as error:
        reason = str(error).lower()
        raise ClusterError(f"${SSH_VARIABLE} is {line!r}, which cannot be read as a shell does: {reason}") from error


def _folder_name(machine: str) -> str:
    """Return a folder name that is valid on any file system and unique for the machine's name."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", machine)[:40]
    return f"{plain}-{hashlib.sha256(machine.encode()).hexdigest()[:8]}"
