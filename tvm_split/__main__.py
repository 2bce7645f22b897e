"""``python -m tvm_split``: the command line."""

from tvm_split_command import main

main()
