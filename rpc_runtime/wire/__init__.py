"""The wire protocol and its security: protobuf messages, frames, tokens, TLS. Used by both sides; imports no TVM."""
