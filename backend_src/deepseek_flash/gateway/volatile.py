"""Lines that change with every request and say nothing to the model.

Claude Code puts ``x-anthropic-billing-header: … cch=fa690;`` in front of its system prompt. The
hash is new each time, so neither the cache nor vLLM's prefix cache would ever see a prompt twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class VolatileLines:
    """Takes lines of known names off the very beginning of a system prompt, and nothing else.

    Not from the middle, not from what users say, and only whole lines ``name: …``: there such a
    line might mean something.
    """

    def __init__(self, names: Iterable[str]) -> None:
        alternatives = "|".join(re.escape(name) for name in names)
        self._pattern = (
            re.compile(rf"\A(?:(?:{alternatives}):[^\n]*(?:\n|\Z))+") if alternatives else None
        )

    @classmethod
    def of(cls, setting: str) -> VolatileLines:
        """From a comma-separated list of names, or ``none``."""
        if setting.lower() == "none":
            return cls(())
        return cls(name.strip() for name in setting.split(",") if name.strip())

    def strip(self, text: str) -> str:
        """A system prompt's text without them."""
        return text if self._pattern is None else self._pattern.sub("", text)
