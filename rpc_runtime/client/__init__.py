"""The client's side: opens programs on workers, streams micro-batches and reports failures. Does not need TVM."""
