"""Dataclasses for deployed programs, their per-machine parts, and measurements. Used by both sides; imports no TVM."""
