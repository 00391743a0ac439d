"""An operator's files: a JSON object a line. What is wrong is told by file, line and field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from deepseek_flash.contract import InvalidField

Item = TypeVar("Item")


def read_lines(
    path: Path, parse: Callable[[dict[str, Any]], Item], error: type[ValueError]
) -> Iterator[Item]:
    """What ``parse`` makes of each line, in their order. Blank lines are passed over.

    Args:
        parse: may raise InvalidField.
    Raises:
        error: naming the first line that is wrong.
        OSError: the file cannot be read.
    """
    for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            yield parse(_object(raw))
        except InvalidField as problem:
            raise error(f"{path}, line {number}: {problem}") from None


def field_value(line: dict[str, Any], name: str, kind: type) -> Any:
    """A field's value; null is absent.

    Raises InvalidField.
    """
    value = line.get(name)
    if value is not None and type(value) is not kind:
        raise InvalidField(name, f"must be {kind.__name__}, not {type(value).__name__}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidField(name, "must be valid Unicode") from None
    return value


def _object(raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidField("line", f"not valid JSON ({error})") from None
    if not isinstance(line, dict):
        raise InvalidField("line", "must be a JSON object")
    return line
