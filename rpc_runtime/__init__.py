"""What runs on the machines, and the client's side of it: see ``pipeline``, ``worker`` and ``local_workers``."""
