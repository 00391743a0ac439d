"""What the live view concludes from readings, how it looks, and that it outlives its server."""

import io
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice

import pytest
from rich.console import Console

from clients import watch
from clients.watch import Reading, Unreachable, View, compare, draw, frames

URL = "http://127.0.0.1:8002/metrics"

BEFORE = """
# HELP dspark_tokens_total Tokens by path
# TYPE dspark_tokens_total counter
dspark_tokens_total{model="deepseek_decoder",path="fast",version="1"} 100
dspark_tokens_total{model="deepseek_decoder",path="slow",version="1"} 500
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total 600
# TYPE dspark_drafts_proposed_total counter
dspark_drafts_proposed_total{source="history"} 40
# TYPE dspark_drafts_accepted_total counter
dspark_drafts_accepted_total{source="history"} 30
# TYPE dspark_steps_total counter
dspark_steps_total 10
# TYPE dspark_step_seconds_total counter
dspark_step_seconds_total 1.0
# TYPE dspark_decision_seconds_total counter
dspark_decision_seconds_total 0.01
# TYPE dflash_lookups_total counter
dflash_lookups_total{result="exact"} 3
"""

AFTER = """
# TYPE dspark_tokens_total counter
dspark_tokens_total{model="deepseek_decoder",path="fast",version="1"} 350
dspark_tokens_total{model="deepseek_decoder",path="burst",version="1"} 150
dspark_tokens_total{model="deepseek_decoder",path="slow",version="1"} 1100
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total 1600
# TYPE avg_tokens_per_second gauge
avg_tokens_per_second 432.1
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 7
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting 3
# TYPE p95_first_token_latency gauge
p95_first_token_latency 0.14525
# TYPE burst_count_per_second gauge
burst_count_per_second 5.5
# TYPE dspark_drafts_proposed_total counter
dspark_drafts_proposed_total{source="history"} 440
dspark_drafts_proposed_total{source="chain"} 90
# TYPE dspark_drafts_accepted_total counter
dspark_drafts_accepted_total{source="history"} 327
dspark_drafts_accepted_total{source="chain"} 81
# TYPE dspark_entropy_ratio gauge
dspark_entropy_ratio 1.25
# TYPE dspark_gap gauge
dspark_gap 0.875
# TYPE dspark_attention_variance gauge
dspark_attention_variance 0.000321
# TYPE dspark_steps_total counter
dspark_steps_total 60
# TYPE dspark_step_seconds_total counter
dspark_step_seconds_total 3.0
# TYPE dspark_decision_seconds_total counter
dspark_decision_seconds_total 0.035
# TYPE dspark_cost_error gauge
dspark_cost_error 0.083
# TYPE dflash_hit_rate gauge
dflash_hit_rate 0.615
# TYPE dflash_entries gauge
dflash_entries 512
# TYPE dflash_lookups_total counter
dflash_lookups_total{result="exact"} 9
dflash_lookups_total{result="miss"} 17
# TYPE dflash_lookup_seconds_bucket counter
dflash_lookup_seconds_bucket{le="+Inf"} 26
"""


def view_of(before=BEFORE, after=AFTER, seconds=2.0):
    return compare(Reading.parse(before, 10.0), Reading.parse(after, 10.0 + seconds))


def drawn(frame, width=80, **options):
    console = Console(file=io.StringIO(), width=width, height=24, **options)
    console.print(draw(frame, URL))
    return console.file.getvalue()


# -- readings and rates ------------------------------------------------------------------------


def test_series_are_summed_over_all_other_labels():
    reading = Reading.parse(
        '# TYPE a_total counter\na_total{p="x",v="1"} 1\na_total{p="x",v="2"} 2\na_total{p="y"} 4\n'
        '# TYPE g gauge\ng{m="1"} 0.5\ng{m="2"} 0.25\n',
        0.0,
    )
    assert (reading.value("a_total"), reading.value("a_total", p="x")) == (7, 3)
    assert reading.value("g") == 0.75
    assert reading.value("a_total", p="z") is reading.value("a") is None


def test_types_and_helps_are_not_needed():
    assert Reading.parse("a_total 3\nb 4\n", 0.0).value("a_total") == 3


def test_what_is_no_number_is_absent():
    reading = Reading.parse("a NaN\nb +Inf\nc 0\n", 0.0)
    assert [reading.value(name) for name in "abc"] == [None, None, 0]


def test_rates_are_per_second():
    view = view_of()
    assert (view.seconds, view.tokens) == (2.0, 500.0)
    # The miss had no series before its first increment.
    expected = {"exact": 3.0, "window": None, "miss": 8.5, "semantic": None}
    assert view.lookups == expected


def test_path_shares():
    assert view_of().path_shares == {"fast": 0.25, "burst": 0.15, "slow": 0.6}


def test_drafts():
    drafts = view_of().drafts
    assert (drafts["history"].proposed, drafts["history"].accepted) == (200.0, 148.5)
    assert drafts["history"].acceptance == pytest.approx(0.7425)
    assert drafts["chain"].acceptance == pytest.approx(0.9)
    assert drafts["reference"].proposed is drafts["reference"].acceptance is None


def test_steps():
    steps = view_of().steps
    assert (steps.rate, steps.seconds) == (25.0, pytest.approx(0.04))
    assert steps.decision_seconds == pytest.approx(0.0005)
    assert steps.decision_share == pytest.approx(0.0125)


def test_shares_of_nothing_are_unknown():
    view = view_of(AFTER, AFTER)
    assert view.tokens == view.steps.rate == view.drafts["chain"].proposed == 0
    assert set(view.path_shares.values()) == {None}
    assert view.steps.seconds is view.drafts["chain"].acceptance is None


def test_a_counter_that_fell_has_no_rate_and_the_others_do():
    fallen = AFTER.replace("generation_tokens_total 1600", "generation_tokens_total 20")
    view = view_of(after=fallen)
    assert (view.tokens, view.steps.rate) == (None, 25.0)


def test_after_a_restart_there_are_gauges_only():
    view = view_of(AFTER, BEFORE)
    rates = [view.tokens, view.steps.rate, *view.path_shares.values(), *view.lookups.values()]
    assert set(rates) == {None}
    assert view_of(AFTER, "dflash_entries 1\n").entries == 1


def test_one_reading_has_gauges_only():
    view = compare(None, Reading.parse(AFTER, 0.0))
    assert view.seconds is view.tokens is view.path_shares["fast"] is view.steps.rate is None
    assert (view.running, view.hit_rate, view.signals["gap"]) == (7, 0.615, 0.875)


# -- drawing -----------------------------------------------------------------------------------

FIGURES = (
    "500.0", "432.1", "7", "3", "145.25 ms",  # requests
    "25.0%", "15.0%", "60.0%", "5.5",  # paths
    "200.0", "148.5", "74.2%", "45.0", "40.5", "90.0%",  # drafts
    "1.25", "0.875", "0.000321",  # signals
    "25.0", "40.00 ms", "0.50 ms", "1.2%", "8.3%",  # steps
    "61.5%", "512", "3.0", "8.5",  # cache
)  # fmt: skip


def test_a_drawing_has_the_figures_in_80_columns_and_24_lines():
    text = drawn(view_of())
    lines = text.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) == 80
    assert URL in text and "last 2.0 s" in text and "…" not in text
    assert [figure for figure in FIGURES if figure not in text] == []
    assert "\x1b" not in text


def test_bars_are_as_long_as_their_shares():
    lines = drawn(view_of()).splitlines()
    fast, burst, slow = (
        next(line.count("█") for line in lines if f"│ {path} " in line) for path in watch.PATHS
    )
    assert slow > fast > burst > 0


def test_what_is_absent_is_a_dash():
    text = drawn(compare(None, Reading.parse("", 0.0)))
    # 5 of requests, 4 of paths, 9 of drafts, 3 signals, 5 of steps, 6 of the cache, the seconds
    assert text.count("–") == 33
    assert not re.search(r"\d", text.replace(URL, "").replace("p95", ""))


def test_an_address_with_brackets_is_shown_as_it_is():
    console = Console(file=io.StringIO(), width=80)
    console.print(draw(view_of(), "http://[::1]:8002/metrics"))
    assert "http://[::1]:8002/metrics" in console.file.getvalue()


@pytest.mark.parametrize("reason", ["refused", "a long story " * 20])
def test_an_unreachable_server_is_one_line(reason):
    (line,) = drawn(Unreachable(URL, reason)).splitlines()
    assert URL in line and len(line) <= 80


# -- the loop ----------------------------------------------------------------------------------


class Server:
    """Answers /metrics from a list of texts, the last one again and again; it can go and return."""

    def __init__(self):
        self.texts, self.port, self._http = [BEFORE], 0, None

    def start(self):
        texts = self.texts

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                text = texts.pop(0) if len(texts) > 1 else texts[0]
                self.send_response(200 if self.path == "/metrics" and text else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_port
        # Its only delay is how often it looks whether it shall stop.
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.001,))
        self._thread.start()

    def stop(self):
        if self._http is not None:
            self._http.shutdown()
            self._thread.join(timeout=10)
            assert not self._thread.is_alive()
            self._http.server_close()
            self._http = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def server():
    server = Server()
    server.start()
    yield server
    server.stop()


def no_wait(seconds):
    pass


def heartbeats(scheduler, decoder, tokens):
    return (
        f'deepseek_flash_heartbeat_total{{model="dspark_scheduler"}} {scheduler}\n'
        f'deepseek_flash_heartbeat_total{{model="deepseek_decoder"}} {decoder}\n'
        f"vllm:generation_tokens_total {tokens}\n"
    )


def test_the_view_comes_back_with_the_server(server):
    found = frames(f"{server.url}/metrics", 1.0, no_wait)
    first, second = islice(found, 2)
    assert first.seconds is None and second.tokens == 0
    server.stop()
    for gone in islice(found, 2):
        assert isinstance(gone, Unreachable) and gone.url == f"{server.url}/metrics"
    server.texts[:] = [AFTER]
    server.start()
    first, second = islice(found, 2)
    assert first.seconds is None and first.entries == 512, "no rate across the gap"
    assert second.seconds is not None and second.tokens == 0


@pytest.mark.parametrize("text", ["", "this is {no exposition\n"])
def test_a_server_without_metrics_is_unreachable(server, text):
    server.texts[:] = [text, AFTER]
    found = frames(f"{server.url}/metrics", 1.0, no_wait)
    gone, view = islice(found, 2)
    assert isinstance(gone, Unreachable) and "\n" not in str(gone)
    assert isinstance(view, View)


@pytest.mark.parametrize("url", ["nowhere", "http://127.0.0.1:port/metrics", "http:///metrics"])
def test_an_address_that_is_none_is_unreachable(url):
    assert isinstance(next(frames(url, 1.0, no_wait)), Unreachable)


def test_nothing_is_concluded_until_every_model_has_published(server):
    server.texts[:] = [heartbeats(5, 5, 100), heartbeats(6, 5, 100), heartbeats(6, 6, 200)]
    first, same, renewed = islice(frames(f"{server.url}/metrics", 1.0, no_wait), 3)
    assert same is first and first.tokens is None
    assert renewed.tokens > 0


def test_a_model_that_stopped_publishing_holds_up_nothing_for_long():
    before = Reading.parse(heartbeats(5, 5, 100), 0.0)
    assert not Reading.parse(heartbeats(6, 5, 100), 1.0).renews(before)
    assert Reading.parse(heartbeats(6, 5, 100), watch.PATIENCE_SECONDS).renews(before)
    assert Reading.parse(heartbeats(1, 1, 100), 1.0).renews(before), "another server"


def test_a_terminal_shows_view_failure_and_view_again(server):
    """``watch`` runs by itself; what it waits for between readings moves the server on."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    acts = iter([server.stop, lambda: server.texts.insert(0, AFTER), server.start, None])
    shown = []

    def act(seconds):
        shown.append(console.file.getvalue())
        console.file.seek(0)
        console.file.truncate()
        step = next(acts)
        if step is None:
            raise KeyboardInterrupt
        step()

    url = f"{server.url}/metrics"
    with pytest.raises(KeyboardInterrupt):
        watch.watch(frames(url, 1.0, act), url, console)
    view, gone, still, back = shown
    assert "drafts by source" in view and "gives no metrics" not in view
    assert "gives no metrics" in gone and url in gone and "drafts by source" not in gone
    assert "gives no metrics" in still
    assert "512" in back and "gives no metrics" not in back
    assert "\x1b[?25h" in console.file.getvalue(), "the cursor is shown again"


# -- the command -------------------------------------------------------------------------------


def test_a_pipe_gets_one_reading(server, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # it makes rich take any pipe for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    server.texts[:] = [BEFORE, AFTER]
    assert watch.main(["--url", f"{server.url}/", "--interval", "0.001"]) == 0
    told = capsys.readouterr().out
    assert told.count("drafts by source") == 1 and "25.0%" in told


def test_a_pipe_from_nowhere_is_an_error(server, capsys):
    server.stop()
    assert watch.main(["--url", server.url]) == 1
    told = capsys.readouterr()
    assert not told.out and f"error: {server.url}/metrics: " in told.err


def test_ctrl_c_is_a_clean_end(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(watch, "frames", interrupted)
    assert watch.main([]) == 0


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_interval_is_positive(interval, capsys):
    with pytest.raises(SystemExit):
        watch.main(["--interval", interval])
    assert "--interval" in capsys.readouterr().err
