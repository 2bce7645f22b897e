"""Settings of the tests with TensorFlow, before it is imported: those of the command line, so that it logs nothing."""

import os

os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "1", "TF_ENABLE_ONEDNN_OPTS": "0"})
