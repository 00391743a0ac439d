"""What a load test shows and leaves on the disk."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta, timezone
from html.parser import HTMLParser

import pytest

from loadtest.report import files, plots
from loadtest.report.figures import BY_NAME, COLUMNS, FIGURES
from loadtest.report.html import MOST_ERRORS, report
from loadtest.report.summary import summarise
from loadtest.report.table import cells, show
from loadtest.report.verdict import Check, check_all, read_limits
from tests.unit.loadtest_runs import failed, leg, moment, published, record, run, whole_run

WHEN = datetime(2026, 11, 30, 13, 7, 9, tzinfo=UTC)
EVIL = "<script>alert('x')</script> & \"more\"\n=1+1"


@pytest.fixture(autouse=True, scope="module")
def undrawn():
    """Plots take long, and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("latencies", "over_time", "paths"):
            patch.setattr(plots, name, lambda *_: "<svg></svg>")
        yield


def written(played, out, when=WHEN):
    summary = summarise(played)
    return files.write(played, summary, check_all(played, summary, read_limits()), out, when)


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def strict(path):
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# -- files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    played = whole_run(prompts=EVIL, bursts={"ranges": 4, "counter": 4.0})
    return played, written(played, tmp_path_factory.mktemp("out"))


def test_all_files_are_there(whole):
    _, directory = whole
    assert directory.name == "20261130T130709Z"
    names = {"summary.json", "summary.csv", "requests.csv", "metrics.json", "report.html"}
    assert {path.name for path in directory.iterdir()} == names


def test_the_summary_is_strict_json(whole):
    played, directory = whole
    found = strict(directory / "summary.json")
    assert found["time"] == "2026-11-30T13:07:09+00:00"
    assert found["phases"] == summarise(played)["phases"] and found["prompts"] == EVIL
    names = [check["name"] for check in found["checks"]]
    assert "mixed.ratio.tokens_per_s" in names and len(names) == len(read_limits()) + 3
    assert found["phases"]["mixed"]["off"]["hit_rate"] is None


def test_the_summary_as_a_table(whole):
    _, directory = whole
    found = rows(directory / "summary.csv")
    assert len(found) == 9 * len(FIGURES)
    values = {(row["phase"], row["side"], row["figure"]): row["value"] for row in found}
    assert values["mixed", "ratio", "tokens_per_s"] == "2.0"
    assert values["mixed", "off", "hit_rate"] == ""


def test_one_row_a_request(tmp_path):
    records = [record(3, gaps=(0.5, 0.25), kind="sql", length="short", repeat=True), failed(EVIL)]
    found = rows(written(run(leg(records=records)), tmp_path) / "requests.csv")
    place = {"phase": "mixed", "loop": "closed", "side": "on", "part": "0"}
    assert [row | place for row in found] == found
    assert (found[0]["number"], found[0]["gaps"], found[0]["repeat"]) == ("3", "0.5 0.25", "True")
    assert (found[1]["error"], found[1]["first"]) == (EVIL, "")


def test_metrics_of_the_moments_are_columns(tmp_path):
    more = {"dspark_steps_total": {"": 2.0}, "dspark_gap": {"": float("nan")},
            "x_bucket": {"+Inf": 1.0}}  # fmt: skip
    played = run(leg(moments=(moment(1.0, 5), moment(2.5, 6, more)), after=published(9, more)))
    (found,) = strict(written(played, tmp_path) / "metrics.json")
    assert (found["at"], found["memory"]) == ([1.0, 2.5], [5, 6])
    assert found["moments"]["dspark_steps_total"] == [None, 2.0]
    assert found["moments"]["dspark_gap"] == [None, None]
    assert found["moments"]["deepseek_flash_heartbeat_total{dflash_cache}"] == [2.0, 2.0]
    assert "x_bucket{+Inf}" in found["after"] and "x_bucket{+Inf}" not in found["moments"]
    assert (found["phase"], found["side"], found["users"]) == ("mixed", "on", 4)


def test_latest_points_at_the_newest(tmp_path):
    first = written(run(), tmp_path / "out")
    second = written(run(), tmp_path / "out")
    assert (first.name, second.name) == ("20261130T130709Z", "20261130T130709Z-2")
    latest = tmp_path / "out" / "latest"
    assert latest.is_symlink() and str(latest.readlink()) == second.name
    east = WHEN.astimezone(timezone(timedelta(hours=8))) + timedelta(seconds=1)
    third = written(run(), tmp_path / "out", east)
    assert third.name == "20261130T130710Z" and latest.resolve() == third.resolve()
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {first.name, second.name, third.name, "latest"}


def test_latest_stays_where_it_was_when_writing_fails(tmp_path, monkeypatch):
    first = written(run(), tmp_path)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files, "report", fail)
    with pytest.raises(OSError, match="no space"):
        written(run(), tmp_path)
    assert str((tmp_path / "latest").readlink()) == first.name


# -- the page --------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements that were opened, and the text that is shown."""

    def __init__(self, text):
        super().__init__()
        self.opened, self.attributes, self.shown = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.shown += data


def page(played):
    summary = summarise(played)
    return report(played, summary, check_all(played, summary, read_limits()), "2026-11-30")


def test_the_page_shows_everything(whole):
    _, directory = whole
    found = Page((directory / "report.html").read_text(encoding="utf-8"))
    # Warm-up, mixed and burst: latencies; over time, mixed twice; paths.
    assert found.opened.count("svg") == found.opened.count("figure") == 3 + 4 + 1
    for figure in FIGURES:
        assert figure.title.strip() in found.shown and figure.meaning in found.shown
    for text in ("128 → 215 (1.68x)", "mixed.ratio.tokens_per_s", "smollm2", "2.00x", "None."):
        assert text in found.shown
    assert "dspark_tokens_total{fast}" in found.shown


def test_what_comes_from_outside_is_escaped():
    played = run(leg(records=[failed(EVIL), failed(EVIL), failed("other")]), prompts=EVIL,
                 model=EVIL)  # fmt: skip
    found = Page(page(played))
    assert "script" not in found.opened and found.shown.count(EVIL) == 3
    assert f"{EVIL}mixedon2" in found.shown and "othermixedon1" in found.shown


def test_errors_that_are_all_different_do_not_fill_the_page():
    records = [failed(f"no {number}") for number in range(MOST_ERRORS + 3)]
    assert "And 3 messages more" in page(run(leg(records=records)))


def test_a_run_with_nothing_in_it_has_a_page():
    assert "Load test" in page(run())
    assert "svg" in page(run(leg(records=[], seconds=0.0, before={}, after={})))


# -- the terminal ----------------------------------------------------------------------------


def test_a_row_of_the_table():
    summary = summarise(whole_run())
    found = cells(summary, BY_NAME["tokens_per_s"])
    assert found == ["tokens/s", *["2.0", "4.0", "2.00x"] * 3, "128 → 215 (1.68x)"]
    found = cells(summary, BY_NAME["hit_rate"])
    assert found[1:4] == ["–", "90.0%", "–"] and len(found) == 2 + 3 * len(COLUMNS)
    assert cells(summary, BY_NAME["memory_peak"])[1] == "1.00"


@pytest.mark.parametrize("width", ["80", "200"])
def test_both_tables_are_printed_whole(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    printed = io.StringIO()
    checks = [
        Check("mixed.on.errors", 0.0, "≤ 0", True),
        Check("any.locust_cpu", 0.6, "≤ 0.5", False, True),
        Check("mixed.on.hit_rate", None, "≥ 0.85", False, False, "not measured [red]at all[/red]"),
    ]
    show(summarise(whole_run()), checks, printed)
    lines = printed.getvalue().splitlines()
    (row,) = (line for line in lines if line.lstrip().startswith("tokens/s"))
    assert row.split()[:10] == ["tokens/s", *["2.0", "4.0", "2.00x"] * 3] and "(1.68x)" in row
    assert any("good" in line and "mixed.on.errors" in line for line in lines)
    assert any("warning" in line and "0.6" in line for line in lines)
    missed = next(line for line in lines if "MISSED" in line)
    assert "not measured [red]at all[/red]" in missed and "–" in missed
