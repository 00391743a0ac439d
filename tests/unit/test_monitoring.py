"""The Prometheus and Grafana files name metrics that exist, and the alerts do what they say."""

import json
import os
import re
import shutil
import subprocess

import pytest
import yaml
from deepseek_flash import metrics
from deepseek_flash.metrics import Kind

from tests.unit.pbtxt import REPOSITORY

MONITORING = REPOSITORY / "monitoring"

PUBLISHED = {*metrics.SCHEDULER_METRICS, *metrics.CACHE_METRICS, *metrics.DECODER_METRICS}
FOREIGN = {
    "up",  # Prometheus' own, the others are Triton's
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_inference_pending_request_count",
}


def loaded(name):
    return yaml.safe_load((MONITORING / name).read_text(encoding="utf-8"))


CONFIG, TESTS = loaded("prometheus.yml"), loaded("alerts_test.yml")
RULES = [rule for group in loaded("alerts.yml")["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]


# -- names -----------------------------------------------------------------------------------


def series_of(metric):
    if metric.kind is not Kind.HISTOGRAM:
        return {metric.name}
    return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}


EXISTING = FOREIGN.union(*map(series_of, PUBLISHED))
RECORDED = {rule["record"] for rule in RULES if "record" in rule}

# Of a PromQL expression, what holds no metric's name: texts, selectors, ranges, lists of labels.
NO_NAMES = (
    r'"[^"]*"',
    r"\{[^}]*\}",
    r"\[[^\]]*\]",
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)",
)
WORDS = {"and", "or", "unless", "bool", "offset", "sum", "count", "max", "min", "avg"}


def names_in(expression):
    """The metrics that a PromQL expression reads."""
    for pattern in NO_NAMES:
        expression = re.sub(pattern, " ", expression)
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", expression)) - WORDS


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("a_total", {"a_total"}),
        ('1 - sum by (x, y) (rate(a:b_total{c="d", e=~"f|g"}[5m])) / n < 0.5', {"a:b_total", "n"}),
        ("(a or 0 * b) unless on (x) count by (x) (c) == 3", {"a", "b", "c"}),
        ('a{b="}"} / ignoring (p) group_left () sum(c offset 5)', {"a", "c"}),
        ("histogram_quantile(0.95, rate(a_bucket[1m])) > scalar(s)", {"a_bucket", "s"}),
    ],
)
def test_names_are_found(expression, names):
    assert names_in(expression) == names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_read_metrics_that_exist(rule):
    assert names_in(rule["expr"]) <= EXISTING | RECORDED


@pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
def test_panels_read_metrics_that_exist(panel):
    for target in panel["targets"]:
        names = names_in(target["expr"])
        assert names and names <= EXISTING | RECORDED
        assert not unknown_values(target["expr"])


LABELS = {metric.name: metric.labels for metric in PUBLISHED}
LABELS[metrics.ERRORS.name] = metrics.ERRORS.labels  # of all stages


def unknown_values(expression):
    """Label values in an expression's selectors that the metric never has."""
    return {
        (name, label, value)
        for name, selector in re.findall(r"([\w:]+)\{([^}]*)\}", expression)
        for label, values in re.findall(r'(\w+)(?:=|!=|=~|!~)"([^"]*)"', selector)
        for value in values.split("|")
        if LABELS.get(name, {}).get(label) and value not in LABELS[name][label]
    }


def test_unknown_values_are_found():
    assert not unknown_values('dflash_lookups_total{result=~"exact|miss", job="x"} / up{a="b"}')
    found = unknown_values('1 - dspark_tokens_total{path!="fasst"} + dflash_entries')
    assert found == {("dspark_tokens_total", "path", "fasst")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_select_labels_that_exist(rule):
    assert not unknown_values(rule["expr"])


def test_the_dashboards_variable_reads_a_metric_that_exists():
    _, servers = DASHBOARD["templating"]["list"]
    found = re.fullmatch(r"label_values\((\w+), instance\)", servers["query"]["query"])
    assert found.group(1) in EXISTING


# -- alerts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_say_what_to_do(alert):
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"].keys() == {"summary", "description", "runbook"}
    assert re.fullmatch(r"docs/runbook\.md#[a-z-]+", alert["annotations"]["runbook"])


def test_every_alert_is_shown_firing():
    expected = [
        sample["labels"]
        for scenario in TESTS["tests"]
        for query in scenario["promql_expr_test"]
        for sample in query["exp_samples"]
        if 'alertstate="firing"' in sample["labels"]
    ]
    fired = {re.search(r'alertname="(\w+)"', labels).group(1) for labels in expected}
    assert fired == {alert["alert"] for alert in ALERTS}


def test_alerts_know_the_job():
    (job,) = CONFIG["scrape_configs"]
    selected = {name for rule in RULES for name in re.findall(r'job="(\w+)"', rule["expr"])}
    assert selected == {job["job_name"]}


# -- promtool --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"],
)
def test_promtool(command):
    path = os.pathsep.join([os.environ.get("PATH", ""), str(REPOSITORY / "build" / "tools")])
    promtool = shutil.which("promtool", path=path)
    if promtool is None:
        pytest.skip("promtool is neither in PATH nor in build/tools (make promtool)")
    done = subprocess.run(
        [promtool, *command.split()], cwd=MONITORING, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- the dashboard ---------------------------------------------------------------------------


def test_the_dashboards_rows():
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Traffic and latency", "DFlash", "DSpark", "Health"]


def test_panels_have_ids_and_places_of_their_own():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in PANELS)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < 24


def test_the_data_source_is_a_variable():
    source, servers = DASHBOARD["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    readers = [servers, *GRAPHS, *(target for panel in GRAPHS for target in panel["targets"])]
    assert {reader["datasource"]["uid"] for reader in readers} == {f"${{{source['name']}}}"}
