"""The worker process, its services, and what it holds for its callers: ``python -m tvm_split.rpc_runtime.worker``."""
