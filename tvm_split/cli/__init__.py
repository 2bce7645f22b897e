"""The command line: a file per command, or per few related ones.

Commands load what they need when they run, so that ``tvm-split --help`` and ``tvm-split worker`` start at once.
"""
