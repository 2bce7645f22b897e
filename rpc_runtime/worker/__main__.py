"""Where the process of a worker begins, once ``tvm_split`` is loaded."""

import sys

from tvm_split.rpc_runtime.worker.process import main

sys.exit(main())
