"""Text from the other end of a connection, made fit to be shown in a terminal, and of bounded length.

Escape sequences move the cursor, rename the window or answer for the user; a line break begins what looks like another
message; marks of direction turn text round. What is no printable letter is shown as Python would write it: ``\\x1b``.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAXIMUM_LETTERS = 3000

AnyMessage = TypeVar("AnyMessage", bound=Message)


def cleaned(text: str) -> str:
    """The text in one line of printable letters, cut where it gets too long."""
    if len(text) > MAXIMUM_LETTERS:
        text = text[: MAXIMUM_LETTERS - 1] + "…"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def clean_message(message: AnyMessage) -> AnyMessage:
    """The same message, with every text in it cleaned."""
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
    """For logs that may quote a caller: whose words neither begin a line nor move the cursor."""

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
