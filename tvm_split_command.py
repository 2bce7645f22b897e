"""Where the process of ``tvm-split`` begins: outside of ``tvm_split``, whose loading Ctrl-C may interrupt already."""

from rpc_runtime.early_interrupt import end_quietly

end_quietly()


def main() -> None:
    """The console script ``tvm-split``."""
    from tvm_split.cli import main

    main()
