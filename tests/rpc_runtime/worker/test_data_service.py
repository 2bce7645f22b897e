"""Data streams: each link has a secret that opens only this link, and invalid data harms no worker."""

from __future__ import annotations

from dataclasses import replace

import grpc
import numpy as np
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports import links
from rpc_runtime.wire.framing import tensor_frames
from tests.helpers.rpc_runtime.pipelines import open_on, over_grpc, same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain, endless
from tests.helpers.rpc_runtime.raw_calls import hello, silence, speak

REFUSED, LET_IN = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT


def test_a_link_is_opened_by_its_own_secret_only(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batch = batches_for(program, 1)[0]
    without_token = replace(workers.endpoints[B], token=None)
    with open_on(workers, program, maker) as pipe, open_on(workers, program, maker) as second_pipe:
        expected = pipe.run(batch)
        deployment, secrets = pipe.deployment, pipe.link_secrets
        assert set(secrets) == {(A, B), (B, C)}
        assert len({*secrets.values(), *second_pipe.link_secrets.values()}) == 4
        secret = secrets[A, B]
        for greeting in (
            hello(deployment, A, B),
            hello(deployment, A, B, secret=b"0" * len(secret)),
            hello(deployment, A, B, secret=secret[:-1]),
            hello(deployment, A, B, secret=secrets[B, C]),
            hello(deployment, A, B, secret=second_pipe.link_secrets[A, B]),
            hello(second_pipe.deployment, A, B, secret=secret),
            hello("0" * 32, A, B, secret=secret),
            hello(deployment, CLIENT, B, secret=secret),
            hello(deployment, B, CLIENT, secret=secret),
            hello(deployment, C, B, secret=secret),
            b"",
        ):
            assert speak(without_token, greeting, silence()) is REFUSED  # before the caller has sent a message
        # The answer then says that the link is already open.
        assert speak(without_token, hello(deployment, A, B, secret=secret)) is LET_IN
        assert speak(without_token, hello(deployment, A, B, secret=secret, version=3)) is LET_IN
        assert (pipe.run(batch)[0] == expected[0]).all()


def test_a_peer_that_breaks_the_protocol_fails_only_its_deployment(
    workers: LocalWorkers, maker: ProgramMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client violates the protocol: its link to the first machine sends invalid frames."""
    program = chain(maker)
    batch = batches_for(program, 1)[0]
    with open_on(workers, program, maker) as good:
        expected = good.run(batch)
        frames = [frame for n in range(50) for frame in tensor_frames(0, n, np.zeros(64, np.uint8))]  # without credit
        monkeypatch.setattr(links.OutgoingLink, "frames", lambda self: iter(frames))
        with pytest.raises(ProtocolError, match=A), open_on(workers, program, maker, links=over_grpc(program)) as bad:
            list(bad.stream(endless(program)))
        monkeypatch.undo()
        assert same(good.run(batch), expected)
