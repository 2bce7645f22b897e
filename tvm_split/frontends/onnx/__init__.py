"""ONNX models: files, bytes, and plans that are written into them."""
