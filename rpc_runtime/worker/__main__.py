"""Where the process of a worker begins."""

try:
    from tvm_split.rpc_runtime.early_interrupt import end_quietly

    end_quietly()
except KeyboardInterrupt:
    raise SystemExit(130) from None  # 128 + SIGINT

import sys

from tvm_split.rpc_runtime.worker.process import main

sys.exit(main())
