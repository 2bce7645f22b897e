"""A real sshd on loopback with its own keys and settings, which uses nothing of the user's."""

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from rpc_runtime.processes import Closing
from tests.helpers.rpc_lab import free_port
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


def require_ssh() -> str:
    """Return the path of sshd; skip the test where there is none."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs ssh and sshd (Debian: openssh-client, openssh-server)")
    return SSHD


class SshServer(Closing):
    """``command`` is an ssh that reaches it as ``box``, or with an unknown key as ``stranger``.

    Sessions get ``environment``.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        sshd, port = require_ssh(), free_port()
        folder.chmod(0o700)
        for name in ("host", "mine", "other"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(make, check=True, timeout=60)
        shutil.copy(folder / "mine.pub", folder / "authorized")
        if os.geteuid() == 0:
            # sshd confines itself to this folder until a caller is authenticated.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        pairs = " ".join(f'"{name}={value}"' for name, value in environment.items())
        settings = f"SetEnv {pairs}\n" if pairs else ""
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder / 'authorized'}\nStrictModes no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n{settings}"
        )
        kind, key = (folder / "host.pub").read_text().split()[:2]
        (folder / "known").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
        common = f"HostName 127.0.0.1\nPort {port}\nUser {getpass.getuser()}\nIdentitiesOnly yes\n"
        (folder / "ssh_config").write_text(
            f"Host box\n{common}IdentityFile {folder / 'mine'}\n"
            f"Host stranger\n{common}IdentityFile {folder / 'other'}\n"
            f"Host *\nUserKnownHostsFile {folder / 'known'}\nGlobalKnownHostsFile /dev/null\n"
        )
        self.command = f"ssh -F {folder / 'ssh_config'}"
        self._log = (folder / "sshd.log").open("wb")
        self.process = subprocess.Popen(
            [sshd, "-D", "-e", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL, stderr=self._log
        )
        try:
            eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, f"sshd answers: {self._log.name}")
        except AssertionError:
            self.close()
            raise

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_SECONDS)
        self._log.close()
