"""The operator's own log: a JSON object a line, in the order of arrival.

| field | meaning |
| --- | --- |
| ``prompt`` or ``messages`` | a raw text, or a chat as in a request |
| ``max_tokens`` | optional |
| ``at`` | seconds on any clock or an ISO time; in every line or in none, and never falling |
| ``session_id``, ``cache_salt`` | optional texts |

Null is absent, other fields are ignored: logs have more.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deepseek_flash.contract import InvalidField
from deepseek_flash.dspark.prompt import parse_messages

from loadtest.jsonl import field_value, read_lines
from loadtest.traffic.trace import Entry


class LogError(ValueError):
    """A log that cannot be read: path, line number, field and what is wrong."""


@dataclass(frozen=True, slots=True)
class _Moment:
    seconds: float
    form: str  # moments of one form alone can be compared


def read_log(path: Path) -> list[Entry]:
    """All requests of a log, their times relative to the first. Blank lines are passed over.

    Raises:
        LogError: naming the first line that is wrong, or the file if it has no request.
        OSError: the file cannot be read.
    """
    times = _Times()
    entries = list(
        read_lines(path, lambda line: replace(_entry(line), at=times.take(_moment(line))), LogError)
    )
    if not entries:
        raise LogError(f"{path}: no request in it")
    return entries


class _Times:
    """Moments in the order of a log, relative to the first."""

    def __init__(self) -> None:
        self._first: _Moment | None = None
        self._last: _Moment | None = None
        self._begun = False

    def take(self, moment: _Moment | None) -> float | None:
        """Seconds since the first.

        Raises InvalidField: some lines have a time and some have none, or it has fallen.
        """
        if self._begun:
            _check_order(self._last, moment)
        else:
            self._first, self._begun = moment, True
        self._last = moment
        if moment is None or self._first is None:
            return None
        return round(moment.seconds - self._first.seconds, 6)


def _entry(line: dict[str, Any]) -> Entry:
    text, chat = field_value(line, "prompt", str), field_value(line, "messages", list)
    if (text is None) is (chat is None):
        raise InvalidField("prompt", "a line must have prompt or messages, and not both")
    if text == "":
        raise InvalidField("prompt", "must not be empty")
    max_tokens = field_value(line, "max_tokens", int)
    if max_tokens is not None and max_tokens < 1:
        raise InvalidField("max_tokens", f"must be at least 1, not {max_tokens}")
    return Entry(
        text=text,
        messages=None if chat is None else _messages(chat),
        max_tokens=max_tokens,
        session_id=field_value(line, "session_id", str),
        cache_salt=field_value(line, "cache_salt", str),
    )


def _messages(chat: list[Any]) -> tuple[tuple[str, str], ...]:
    found = parse_messages(json.dumps(chat))
    return tuple((message["role"], message["content"]) for message in found)


def _moment(line: dict[str, Any]) -> _Moment | None:
    value = line.get("at")
    try:
        if value is None:
            return None
        if isinstance(value, str):
            time = datetime.fromisoformat(value)
            if time.tzinfo is not None:
                return _Moment(time.timestamp(), "an ISO time with a time zone")
            return _Moment(time.replace(tzinfo=UTC).timestamp(), "an ISO time without a time zone")
        if type(value) in (int, float) and math.isfinite(value):
            return _Moment(float(value), "a number of seconds")
    except (ValueError, OverflowError):
        pass
    raise InvalidField("at", f"must be seconds or an ISO time, not {json.dumps(value)[:40]}")


def _check_order(last: _Moment | None, moment: _Moment | None) -> None:
    if (last is None) is not (moment is None):
        raise InvalidField("at", "must be in every line or in none")
    if last is None or moment is None:
        return
    if last.form != moment.form:
        raise InvalidField("at", f"must be {last.form}, as in the lines before")
    if moment.seconds < last.seconds:
        raise InvalidField("at", "earlier than in the line before; sort the log by its times")
