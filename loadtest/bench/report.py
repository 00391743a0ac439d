"""Where a benchmark leaves its figures."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "out"


def write_report(target: str, figures: Mapping[str, Any]) -> Path:
    """Write ``loadtest/out/<target>/latest.json`` and return its path."""
    path = OUT / target / "latest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"target": target, "finished": time.strftime("%FT%TZ", time.gmtime()),
            "machine": platform.machine()}  # fmt: skip
    path.write_text(json.dumps({**head, **figures}, indent=2, ensure_ascii=False) + "\n")
    return path
