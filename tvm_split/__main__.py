"""The command line: ``tvm-split`` and ``python -m tvm_split``."""

import gc
import os
import signal


def main() -> None:
    """Run the command of this process's arguments and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C during the imports ends the process without a traceback, and with the exit code of later.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    # Packages create half a million objects that stay: searching them for garbage takes a third of the time of imports.
    gc.set_threshold(50_000)
    from tvm_split.cli.application import run_application

    run_application()


if __name__ == "__main__":
    main()
