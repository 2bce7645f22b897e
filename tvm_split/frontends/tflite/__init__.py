"""TFLite files, without TensorFlow."""
