"""The client's side: workers found, programs opened on them, micro-batches streamed through, failures told. No TVM."""
