"""What runs on the machines, and the client's side of it: see ``pipeline``, ``worker`` and ``local_workers``."""

import os

# gRPC's handlers of forks now and then abort the child or stall the parent, unless no other thread uses gRPC (as its
# doc/fork_support.md says), and torch's DataLoader forks. Without them all goes well as long as a child leaves the
# parent's connections alone, see `own_process`. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# The poller that grpcio 1.80 made Python's default costs a third more processor time for small messages (grpc#41432).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
