"""Import ONNX models from files and bytes, and write plans into models as annotations."""
