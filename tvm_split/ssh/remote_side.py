"""The program that `tvm-split up` and `down` run on a machine, sent over ssh as ``python -c``.

So it imports only Python's standard library and `rpc_runtime.private_folder`, which is sent with it.

The request is a line of JSON on standard input; the worker's source follows if this program asks for it. Answers are
lines of JSON on standard output that begin with `MARK`, since login shells write there as well. When standard input
ends, the program ends its child process, removes unfinished files, and exits. A worker holds a lock on its folder while
it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
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


class Child:
    """The one child process that runs at a time; `end` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise Refusal("nobody waits for it any more")
            self._process = subprocess.Popen(command, start_new_session=True, **options)  # noqa: S603 (no shell)
            return self._process

    def let_go(self) -> None:
        """Detach the process: it keeps running when this program ends."""
        with self._lock:
            self._process = None

    def end(self) -> None:
        with self._lock:
            self._ended, process = True, self._process
        if process is not None:
            stop(process.pid, process.poll)


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
        self.folder = Path(request["folder"]).expanduser().absolute()
        self.process_file = self.folder / "process"
        self.child = Child()
        self.unfinished: list[Path] = []
        self.last: deque[str] = deque(maxlen=5)
        """The last lines that the worker logged."""

    def up(self, taken: Any) -> None:
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
        # Another user who can open the file could hold the lock, and so keep the worker from starting.
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(lock, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refusal("a worker that was started by `up` runs here already: `tvm-split down` ends it") from None
        self._take_source(taken)
        threading.Thread(target=self._watch, daemon=True).start()
        self._run(self._python(), lock)

    def down(self) -> None:
        """End this folder's worker, if it runs, and remove the folder, if that is requested."""
        found = self._running()
        if found:
            stop(found, lambda: None if self._running() == found else 0)
            if self._running() == found:
                raise Refusal(f"the worker, process {found}, did not end")
        self.process_file.unlink(missing_ok=True)
        if self.request["remove"]:
            shutil.rmtree(self.folder, ignore_errors=True)
        say("stopped", process=found)

    def _running(self) -> int:
        """Return this folder's worker process, or 0. Its command line is checked, since process numbers are reused."""
        try:
            process = int(self.process_file.read_text())
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return 0
        return process if str(self.folder / "blobs").encode() in words else 0

    def _take_source(self, taken: Any) -> None:
        """Receive the worker's source, unless the folder has it by its digest, and remove older sources."""
        self.source = self.folder / f"source-{self.request['digest']}"
        if self.source.is_dir():
            say("known")
            return
        say("wanted")
        size = int(taken.readline())
        content = taken.read(size)
        if len(content) != size:
            raise Refusal("the connection ended while the worker was copied")
        for old in self.folder.glob("source-*"):
            shutil.rmtree(old, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix="source-part-", dir=self.folder))
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as packed:
                packed.extractall(part, filter="data")
            part.rename(self.source)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _python(self) -> str:
        """Return a Python with the packages that a worker needs: this one, or that of a virtual environment here."""
        needs = self.request["needs"]
        if all(installed(name) == version for name, version in needs.items()):
            return sys.executable
        own = self.folder / "venv"
        mark = own / "installed.json"
        if mark.is_file() and json.loads(mark.read_text()) == needs:
            return str(own / "bin/python")
        shutil.rmtree(own, ignore_errors=True)
        self.unfinished.append(own)
        say("installing", needs=needs)
        self._finish([sys.executable, "-m", "venv", str(own)], "making a virtual environment")
        pinned = [f"{name}=={version}" for name, version in needs.items()]
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
        self._finish([str(own / "bin/python"), "-m", "pip", "install", *options, *pinned], "installing")
        mark.write_text(json.dumps(needs))
        self.unfinished.remove(own)
        return str(own / "bin/python")

    def _finish(self, command: list[str], what: str) -> None:
        process = self.child.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        last = ""
        for line in process.stdout or ():
            last = line.decode(errors="replace").rstrip() or last
            say("line", text=last)
        if process.wait():
            raise Refusal(f"{what} failed with exit code {process.returncode}: {last}")

    def _run(self, python: str, lock: int) -> None:
        detach = self.request["detach"]
        command = [python, "-m", "rpc_runtime.worker", *self.request["arguments"]]
        command += ["--cache", str(self.folder / "blobs"), "--json", *([] if detach else ["--exit-with-parent"])]
        environment = {**os.environ, "PYTHONPATH": str(self.source)}
        environment.pop("TVM_SPLIT_TOKEN", None)
        if self.request["token"]:
            environment["TVM_SPLIT_TOKEN"] = self.request["token"]
        log = self.folder / "log"
        with log.open("wb") as kept:
            process = self.child.start(
                command,
                stdin=subprocess.DEVNULL if detach else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=kept if detach else subprocess.PIPE,
                env=environment,
                pass_fds=(lock,),
            )
        self.process_file.write_text(str(process.pid))
        self.unfinished.append(self.process_file)
        lines = [] if detach else [threading.Thread(target=self._forward, args=(process.stderr,), daemon=True)]
        for thread in lines:
            thread.start()
        late = threading.Timer(READY_SECONDS, self.child.end)
        late.start()
        ready = process.stdout.readline() if process.stdout is not None else b""
        late.cancel()
        if not ready:
            process.wait()
            for thread in lines:
                thread.join(STOP_SECONDS)
            said = " / ".join(self.last) or log.read_text(errors="replace").strip()
            raise Refusal(f"the worker ended with exit code {process.returncode} while it started. {said}".strip())
        say("ready", **json.loads(ready))
        if detach:
            self.unfinished.remove(self.process_file)
            self.child.let_go()
            return
        code = process.wait()
        for thread in lines:
            thread.join(STOP_SECONDS)
        raise Refusal(f"the worker ended with exit code {code}")

    def _forward(self, pipe: Any) -> None:
        for line in pipe:
            self.last.append(line.decode(errors="replace").rstrip())
            say("line", text=self.last[-1])

    def _watch(self) -> None:
        """Wait until the caller closes standard input, then end everything."""
        while os.read(0, 4096):
            pass
        self.leave()

    def leave(self) -> NoReturn:
        self.child.end()
        for path in self.unfinished:
            shutil.rmtree(path, ignore_errors=True)
            if path.is_file():
                path.unlink(missing_ok=True)
        os._exit(0)


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    os.umask(0o077)
    taken = os.fdopen(os.dup(0), "rb", buffering=0)
    machine = Machine(json.loads(read_line(taken)))
    try:
        if machine.request["do"] == "up":
            machine.up(Unbuffered(taken))
        else:
            machine.down()
    except Refusal as refusal:
        say("refused", text=str(refusal))
    except OSError as error:
        say("refused", text=f"{error.filename or machine.folder}: {error.strerror}")
    if machine.unfinished:
        machine.leave()


def read_line(taken: Any) -> bytes:
    """Read one line byte by byte, since a buffered reader would take what follows as well."""
    line = b""
    while not line.endswith(b"\n"):
        part = taken.read(1)
        if not part:
            break
        line += part
    return line


class Unbuffered:
    """A reader that reads no more bytes than requested."""

    def __init__(self, taken: Any) -> None:
        self._taken = taken

    def readline(self) -> bytes:
        return read_line(self._taken)

    def read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = self._taken.read(size - len(found))
            if not part:
                break
            found += part
        return bytes(found)


if __name__ == "__main__":
    main()
