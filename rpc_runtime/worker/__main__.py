"""``python -m rpc_runtime.worker``: a worker's process."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

from rpc_runtime.worker.process import main

sys.exit(main())
