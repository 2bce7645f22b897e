"""The command line, one file per command.

Commands load what they need when they run, so that ``tvm-split --help`` and ``tvm-split worker`` start at once.
"""
