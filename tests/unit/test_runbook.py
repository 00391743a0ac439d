"""The runbook names only what exists: alerts' headings, metrics, flags, targets, tests."""

import ast
import re

import pytest
from deepseek_flash import serve
from deepseek_flash.config import CONFIGS

from tests.unit.pbtxt import MODELS, REPOSITORY
from tests.unit.test_monitoring import ALERTS, EXISTING, RECORDED, unknown_values

TEXT = (REPOSITORY / "docs" / "runbook.md").read_text(encoding="utf-8")
PREFIXES = "vllm:|deepseek_flash:|deepseek_flash_|dflash_|dspark_|nv_|burst_|p95_"


def anchors(text):
    """As GitHub makes them of headings. A line of a code block that begins with # is none."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_alert_has_a_heading():
    assert {alert["annotations"]["runbook"].split("#")[1] for alert in ALERTS} <= anchors(TEXT)


def test_links_within_lead_somewhere():
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= anchors(TEXT)


def test_metrics_settings_and_models_exist():
    settings = {name for kind in CONFIGS.values() for name in kind.__dataclass_fields__}
    models = {directory.name for directory in MODELS.iterdir()}
    known = EXISTING | RECORDED | settings | models
    # Histograms, and what is looked for by grep, are named by the beginning.
    named = set(re.findall(rf"\b(?:{PREFIXES})\w+", TEXT))
    assert {it for it in named if not any(name.startswith(it) for name in known)} == set()


def test_label_values_exist():
    assert not unknown_values(TEXT)


def test_flags_exist(capsys):
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"--[a-z][a-z-]+", re.sub("<!--.*?-->", "", TEXT))) <= flags | {"--sort"}


def test_targets_exist():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", TEXT)) <= targets


def test_the_tests_that_provoke_rows_exist():
    named = re.findall(r"<!-- [^:]*: (\S+)::(\w+) -->", TEXT)
    assert len(named) == TEXT.count("<!--") > 0
    for path, name in named:
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
