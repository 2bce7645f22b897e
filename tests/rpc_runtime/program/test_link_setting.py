import pytest

from rpc_runtime.program.link_setting import DEFAULT, LinkSetting, Transport


@pytest.mark.parametrize(
    ("setting", "domains", "expected"),
    [
        (DEFAULT, ("one", "one"), Transport.SHARED_MEMORY),
        (DEFAULT, ("one", "other"), Transport.GRPC),
        (DEFAULT, ("", ""), Transport.GRPC),
        (LinkSetting(address="10.0.0.2:7001"), ("one", "one"), Transport.GRPC),
        (LinkSetting(transport=Transport.GRPC), ("one", "one"), Transport.GRPC),
        (LinkSetting(transport=Transport.MPI), ("one", "other"), Transport.MPI),
        (LinkSetting(transport=Transport.NCCL), ("one", "one"), Transport.NCCL),
    ],
)
def test_what_will_carry_a_link(setting, domains, expected):
    assert setting.expected(*domains) is expected
