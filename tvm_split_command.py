"""Where the process of ``tvm-split`` begins: outside of ``tvm_split``, whose loading Ctrl-C may interrupt already."""

try:
    from tvm_split.rpc_runtime.early_interrupt import end_quietly

    end_quietly()
except KeyboardInterrupt:
    raise SystemExit(130) from None  # 128 + SIGINT


def main() -> None:
    """The console script ``tvm-split``."""
    from tvm_split.cli import main

    main()
