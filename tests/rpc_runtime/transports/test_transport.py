from __future__ import annotations

import pytest

from rpc_runtime.transports.transport import DEFAULT, LinkSetting


@pytest.mark.parametrize(
    ("setting", "domains", "expected"),
    [
        (DEFAULT, ("one", "one"), "shm"),
        (DEFAULT, ("one", "other"), "grpc"),
        (DEFAULT, ("", ""), "grpc"),
        (LinkSetting(address="10.0.0.2:7001"), ("one", "one"), "grpc"),
        (LinkSetting(transport="grpc"), ("one", "one"), "grpc"),
        (LinkSetting(transport="mpi"), ("one", "other"), "mpi"),
        (LinkSetting(transport="nccl"), ("one", "one"), "nccl"),
    ],
)
def test_what_will_carry_a_link(setting: LinkSetting, domains: tuple[str, str], expected: str) -> None:
    assert setting.expected(*domains) == expected
