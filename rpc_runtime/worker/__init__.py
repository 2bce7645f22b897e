"""The worker process, its services and the programs it runs: ``python -m rpc_runtime.worker``."""
