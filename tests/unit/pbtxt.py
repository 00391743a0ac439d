"""What the drift tests read of a model's config.pbtxt, written one tensor or parameter a line."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "model_repository"

_TENSOR = re.compile(
    r'\{ name: "(\w+)" data_type: (\w+) dims: \[ (-?\d+) \](?: optional: (true|false))? \}'
)
_PARAMETER = re.compile(r'parameters \{ key: "(\w+)" value \{ string_value: "([^"]*)" \} \}')


def text_of(model: str) -> str:
    return (MODELS / model / "config.pbtxt").read_text(encoding="utf-8")


def parameters(model: str) -> dict[str, str]:
    found = _PARAMETER.findall(text_of(model))
    assert len(found) == text_of(model).count("parameters {"), "a parameter was overlooked"
    return dict(found)


def tensors(model: str, side: str) -> dict[str, tuple[str, str, bool]]:
    """Inputs or outputs: name -> (type, dims, optional)."""
    block = re.search(rf"^{side} \[\n(.*?)^\]", text_of(model), re.MULTILINE | re.DOTALL)
    assert block is not None
    found = _TENSOR.findall(block.group(1))
    assert len(found) == block.group(1).count("name:"), "a tensor was overlooked"
    return {name: (kind, dims, optional == "true") for name, kind, dims, optional in found}


def steps(model: str) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """An ensemble's steps: model -> {"input": [(key, value)], "output": [(key, value)]}."""
    result = {}
    for step in text_of(model).split("model_name:")[1:]:
        name = re.match(r' "(\w+)"', step).group(1)
        result[name] = {
            side: re.findall(rf'{side}_map \{{ key: "(\w+)" value: "(\w+)" \}}', step)
            for side in ("input", "output")
        }
    return result
