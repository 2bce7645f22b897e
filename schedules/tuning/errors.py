"""The errors of tuning; `tvm_split` converts them into its own errors."""


class TuningError(Exception):
    """Tuning cannot continue."""


class DeviceError(TuningError):
    """No device answers or one cannot be used; the message names the tracker and the key, and says what to do."""


class DatabaseError(TuningError):
    """A tuning database cannot be read or written; the message names the file, and the line if it is damaged."""
