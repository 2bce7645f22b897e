"""What is deployed, as values: programs, what each machine knows of them, measurements. Both sides know it; no TVM."""
