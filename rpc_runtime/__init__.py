"""The runtime: what runs on the machines (``worker``, ``execution``, ``transports``), and its client (``client``)."""

import os

# If another thread uses gRPC, gRPC's fork handlers sometimes abort the child or block the parent (see its
# doc/fork_support.md), and torch's DataLoader forks. Without the handlers, a fork is safe as long as the child does not
# use the parent's connections (`processes.OwnProcess`). gRPC reads this variable at import.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

DEBUG_VARIABLE = "TVM_SPLIT_DEBUG"


def is_debugging() -> bool:
    """Return whether `DEBUG_VARIABLE` asks this process to show tracebacks and the logs of libraries."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


# gRPC logs refused handshakes and closed connections to standard error; callers get them as errors. gRPC reads this
# variable when it is first used.
if not is_debugging():
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# The default poller of grpcio 1.80 needs a third more CPU time for small messages (grpc#41432).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
