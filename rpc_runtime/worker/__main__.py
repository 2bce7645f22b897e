"""Entry point of a worker process: ``python -m rpc_runtime.worker``."""

import signal
import sys

from rpc_runtime.processes import take_stdout

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

if __name__ == "__main__":
    results = take_stdout()  # before imports that may print: readers of standard output expect only the ready line

    from rpc_runtime.worker.process import main

    sys.exit(main(results))
