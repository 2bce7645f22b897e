"""What goes over the wire and who may send it: protobuf messages, frames, tokens, TLS. Both sides share it; no TVM."""
