"""``python -m rpc_runtime.worker``: a worker's process."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C gives no traceback of whatever is being imported

from rpc_runtime.worker.process import main

sys.exit(main())
