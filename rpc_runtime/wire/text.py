"""Clean untrusted text from a peer, so that it is safe in a terminal and has a bounded length.

Escape sequences can move the cursor, rename the window or type input for the user. A line break can fake another
message, and direction marks can reverse text. Characters that are not printable are written as Python escapes:
``\x1b``.
"""

import logging
import traceback
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAXIMUM_LETTERS = 3000

AnyMessage = TypeVar("AnyMessage", bound=Message)


def cleaned(text: str) -> str:
    """Return the text as one line of printable characters, truncated to `MAXIMUM_LETTERS` before escaping."""
    if len(text) > MAXIMUM_LETTERS:
        text = text[: MAXIMUM_LETTERS - 1] + "…"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def clean_message(message: AnyMessage) -> AnyMessage:
    """Clean every text in a message in place, and return the message."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                value[:] = [cleaned(text) for text in value]
            else:
                setattr(message, field.name, cleaned(value))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if field.is_repeated else [value]:
                clean_message(part)
    return message


class CleanFormatter(logging.Formatter):
    """Log formatter that cleans messages, since they may quote a peer's text."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return cleaned(f"{self.formatTime(record)} {record.levelname.lower()}: {record.message}")

    def formatException(self, exc_info: Any) -> str:
        chain: list[BaseException] = [exc_info[1]]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        lines: list[str] = []
        for error in reversed(chain):
            lines += "".join(traceback.format_tb(error.__traceback__)).splitlines()
            lines.append(cleaned(f"{type(error).__name__}: {error}"))
        return "\n".join(lines)
