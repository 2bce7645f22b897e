"""Import TFLite files without TensorFlow."""
