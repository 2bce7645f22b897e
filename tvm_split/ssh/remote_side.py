"""The program that `tvm-split up` and `down` run on a machine. It is a line on the standard input of ``python -c``.

So it imports only Python's standard library and `rpc_runtime.private_folder`, which is sent with it.

The request is the next line, in JSON; a kit of the worker follows if this program asks for it. Answers are
lines of JSON on standard output that begin with `MARK`, since login shells write there as well. When standard input
ends, the program ends the worker, unless it is detached, and exits. A worker holds a lock on its folder while it lives.
"""

import contextlib
import fcntl
import io
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from rpc_runtime.private_folder import private_folder

MARK = "@tvm-split "
OLDEST_PYTHON = (3, 11)
STOP_SECONDS = 10.0
READY_SECONDS = 60.0


class Refusal(Exception):
    """The reason, for the user, why the machine cannot do what was requested."""


def say(event: str, **about: Any) -> None:
    line = MARK + json.dumps({"event": event, **about}) + "\n"
    with contextlib.suppress(OSError):  # a caller that has gone is noticed by `_watch`
        os.write(1, line.encode())


def stop(process: int, poll: Any) -> None:
    """End a process and its group: SIGTERM first, then SIGKILL after `STOP_SECONDS`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if poll() is None:
            try:
                os.killpg(process, number)
            except ProcessLookupError:
                return
        deadline = time.monotonic() + STOP_SECONDS
        while poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


class Machine:
    """The folder of one worker on this machine."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        try:
            self.folder = Path(request["folder"]).expanduser().absolute()
            with contextlib.suppress(OSError):
                self.folder.lstat()  # raises a ValueError for a name that no folder can have
        except (RuntimeError, ValueError) as error:  # a RuntimeError, if there is no such user or the user has no home
            raise Refusal(
                f"there is no folder {request['folder']!r}: {error} Name one with folder: in the cluster file"
            ) from None
        self.process_file = self.folder / "process"
        self.worker: subprocess.Popen[bytes] | None = None
        """The worker that ends with this program."""
        self.last: deque[str] = deque(maxlen=5)
        """The last lines that the worker logged."""

    def up(self, incoming: Any) -> None:
        if sys.version_info < OLDEST_PYTHON or sys.platform != "linux":
            raise Refusal(
                f"a worker needs Linux and Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer, and {sys.executable} "
                f"is {sys.version.split()[0]} on {sys.platform}: name another one with python: in the cluster file"
            )
        try:
            private_folder(self.folder)  # private, since the worker's code is run from here
        except PermissionError as error:
            raise Refusal(
                f"cannot keep a worker in {self.folder} ({error.strerror}: {error.filename}): repair owner and mode "
                "(chown, chmod go-w), or name another folder with folder: in the cluster file"
            ) from None
        own = f"{socket.gethostname()}:{os.environ.get('XDG_STATE_HOME') or Path('~/.local/state').expanduser()}"
        if own != self.request["tokens"] != "":
            raise Refusal(
                f"its worker would keep its own token in {own}, and this client looks in {self.request['tokens']}: "
                "name a file with a token for both with token_file: in the cluster file"
            )
        for option, content in self.request.get("files", {}).items():
            (self.folder / f".{option}").write_text(content)
            (self.folder / f".{option}").replace(self.folder / option)  # a worker may read it now
            self.request["arguments"] += [f"--{option.replace('_', '-')}", str(self.folder / option)]
        # Another user who can open the file could hold the lock, and so keep the worker from starting.
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(lock, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if process := self._running():
                say("running", pid=process)
                return
            raise Refusal("another `up` is starting a worker here: wait for it, or end it") from None
        kit = self._take_kit(incoming)
        # Without packages of its own, the kit is imported by a Python that has them.
        command = [str(kit)] if (kit / "__main__.py").exists() else ["-m", "rpc_runtime.worker"]
        self._run([sys.executable, *command], kit, lock)

    def down(self) -> None:
        """End this folder's worker, if it runs, and remove the folder, if that is requested."""
        process = self._running()
        if process:
            stop(process, lambda: None if self._running() == process else 0)
            if self._running() == process:
                raise Refusal(f"the worker, process {process}, did not end")
        self.process_file.unlink(missing_ok=True)
        if self.request["remove"]:
            shutil.rmtree(self.folder, ignore_errors=True)
        say("stopped", process=process)

    def _running(self) -> int:
        """Return this folder's worker process, or 0. Its command line is checked, since process numbers are reused."""
        try:
            process = int(self.process_file.read_text())
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return 0
        return process if str(self.folder / "blobs").encode() in words else 0

    def _take_kit(self, incoming: Any) -> Path:
        """Return the folder of the worker's kit; if it is missing, receive the kit now and remove older ones."""
        has_packages = all(installed(name) == version for name, version in self.request["needs"].items())
        kit = self.folder / f"{'own' if has_packages else 'kit'}-{self.request['digest']}"
        if kit.is_dir():
            say("known")
            return kit
        say("wanted", python=sys.version_info[:2], architecture=platform.machine(), has_packages=has_packages)
        size = int(incoming.readline() or 0)
        content = incoming.read(size)
        if not content or len(content) != size:
            raise Refusal("the connection ended while the worker was copied")
        for old in (*self.folder.glob("own-*"), *self.folder.glob("kit-*"), *self.folder.glob("part-*")):
            shutil.rmtree(old, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=self.folder))
        try:
            _unpack(content, part)
            (part / "kit").rename(kit)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return kit

    def _run(self, command: list[str], kit: Path, lock: int) -> None:
        detach = self.request["detach"]
        command += [*self.request["arguments"], "--cache", str(self.folder / "blobs"), "--json"]
        command += [] if detach else ["--exit-with-parent"]
        environment = {**os.environ, "PYTHONPATH": str(kit / "packages")}
        environment.pop("TVM_SPLIT_TOKEN", None)
        if self.request["token"]:
            environment["TVM_SPLIT_TOKEN"] = self.request["token"]
        log = self.folder / "log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(  # noqa: S603 (no shell)
                command,
                stdin=subprocess.DEVNULL if detach else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file if detach else subprocess.PIPE,
                env=environment,
                pass_fds=(lock,),
                start_new_session=True,
            )
        self.worker = process
        threading.Thread(target=self._watch, daemon=True).start()
        self.process_file.write_text(str(process.pid))
        forwarding = threading.Thread(target=self._forward, args=(process.stderr or (),), daemon=True)
        forwarding.start()
        late = threading.Timer(READY_SECONDS, stop, (process.pid, process.poll))
        late.start()
        ready = process.stdout.readline() if process.stdout is not None else b""
        late.cancel()
        if ready and detach:
            self.worker = None
        if ready:
            say("ready", **json.loads(ready))
        if ready and detach:
            return
        code = process.wait()
        forwarding.join(STOP_SECONDS)
        output = " / ".join(self.last) or log.read_text(errors="replace").strip()
        text = f"the worker ended with exit code {code}"
        raise Refusal(text if ready else f"{text} while it started. {output}".strip())

    def _forward(self, pipe: Any) -> None:
        for line in pipe:
            self.last.append(line.decode(errors="replace").rstrip())
            say("line", text=self.last[-1])

    def _watch(self) -> None:
        """Wait until the caller closes standard input, then end this program, and the worker unless it is detached."""
        while os.read(0, 4096):
            pass
        self.leave()

    def leave(self) -> NoReturn:
        """End this program, and the worker if it is not detached."""
        worker = self.worker  # both the main thread and that of `_watch` may be here
        if worker is not None:
            stop(worker.pid, worker.poll)
            self.process_file.unlink(missing_ok=True)
        os._exit(0)


def _unpack(content: bytes, folder: Path) -> None:
    """Write the plain files of a tar file into a folder; extractall's filter is missing before Python 3.11.4."""
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        for member in packed:
            path = folder / member.name
            if not member.isreg() or ".." in path.parts or not path.is_relative_to(folder):
                raise Refusal(f"the copied worker has {member.name!r}, which is no plain file of its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed.extractfile(member).read())  # type: ignore[union-attr]


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    os.umask(0o077)
    incoming = os.fdopen(os.dup(0), "rb")
    request, machine = json.loads(incoming.readline()), None
    try:
        machine = Machine(request)
        if request["do"] == "up":
            machine.up(incoming)
        else:
            machine.down()
    except Refusal as refusal:
        say("refused", text=str(refusal))
    except OSError as error:
        say("refused", text=f"{error.filename or request['folder']}: {error.strerror}")
    if machine is not None:
        machine.leave()


if __name__ == "__main__":
    main()
