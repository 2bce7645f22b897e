"""Executes stages on one machine: loads them into TVM's runtime, schedules them, times kernels, stores blobs."""
