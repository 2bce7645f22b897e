"""The worker process, its services, and what it holds for its callers: ``python -m rpc_runtime.worker``."""
