"""``tvm-split tracker``: one process, at any port, which ends whole. `RpcLab` uses it with TVM's own servers."""

import re
import signal
import socket

import psutil
import pytest

from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.tracker import listed_servers
from tests.helpers.rpc_lab import free_port
from tests.helpers.waiting import PATIENCE_SECONDS


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_a_message_advises_starts_a_tracker_that_ends_whole(start_process, invoke, number, code):
    address = Address("127.0.0.1", free_port())  # above 9199, up to which TVM's own command looks
    with pytest.raises(WorkerUnavailableError) as refused:
        listed_servers(address)
    (advice,) = re.findall("`tvm-split (.+?)`", str(refused.value))
    process = start_process(*advice.split())
    assert process.stdout.readline().endswith(f":{address.port}\n"), process.communicate()
    assert listed_servers(address) == ()
    assert f"tracker:{address} lists no worker" in invoke("status", "--tracker", address).stderr
    assert psutil.Process(process.pid).children() == []
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, len(errors.splitlines())) == (code, 1), errors
    with pytest.raises(WorkerUnavailableError):
        listed_servers(address)


def test_an_address_that_cannot_be_used(invoke):
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = f"127.0.0.1:{used.getsockname()[1]}"
        errors = invoke("tracker", "--listen", address, code=1).stderr
        assert f"cannot listen at {address}: Address already in use" in errors
    assert "HOST:PORT" in invoke("tracker", "--listen", "nowhere", code=2).stderr
