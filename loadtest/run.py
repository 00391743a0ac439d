"""The load test: what do DFlash and DSpark change on this traffic, on this machine?

Two servers are resident, one with both and one without. Load is on one at a time: warm-up, mixed
and burst phase, each in parts that both servers answer before the next, so that the machine's drift
hits both. At the end there is one table, a report in HTML, and a verdict by the limits of a file.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.launcher.environment import LaunchError, resolve_model
from deepseek_flash.launcher.keeper import run_directory
from deepseek_flash.runtime import Runtime

from loadtest import phases
from loadtest.bursts import check_bursts, profiler_config
from loadtest.phases import Sizes, Traffic
from loadtest.player import DOORS, OPENAI, LocustError, Order, Player
from loadtest.records import OFF, ON, Leg, Run
from loadtest.report.files import write
from loadtest.report.summary import summarise
from loadtest.report.table import show
from loadtest.report.verdict import SLO, check_all, passed, read_limits
from loadtest.scale import SCALES, Scale
from loadtest.served import Served, exit_status, serving
from loadtest.traffic.log import read_log
from loadtest.traffic.prompts import Count
from loadtest.traffic.trace import Recipe

OUT = Path(__file__).resolve().parent / "out"
SWITCHES = {
    OFF: ("--no-enable-dflash", "--no-enable-dspark"),
    ON: ("--enable-dflash", "--enable-dspark"),
}
PROFILES = "profiles"  # in a run's folder
FIRST_REQUESTS = 8  # a server's first are slow; from those of the server without, a rough capacity


@dataclass(frozen=True)
class Options:
    model: str
    scale: Scale
    doors: tuple[str, ...]
    seed: int
    repeat_share: float
    prompts: Path | None
    flags: tuple[str, ...]
    workers: int
    limits: Path
    capacity: float | None  # None: it is measured


class Servers:
    """The two resident servers, and what was played on them."""

    def __init__(self, served: dict[str, Served], player: Player) -> None:
        self.served, self._player = served, player
        self.legs: list[Leg] = []
        self._rounds = 0

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return Runtime(run_directory(self.served[OFF].port) / "runtime").facts().max_model_len

    def play(self, order: Order) -> list[Leg]:
        """On both servers, in another order each time."""
        sides = (OFF, ON) if self._rounds % 2 == 0 else (ON, OFF)
        self._rounds += 1
        return [self.play_on(side, order) for side in sides]

    def play_on(self, side: str, order: Order) -> Leg:
        idle = [it for name, it in self.served.items() if name != side]
        leg = self._player.play(order, side, self.served[side], idle)
        tokens = sum(it.tokens for it in leg.records)
        failed = sum(bool(it.error) for it in leg.records)
        print(
            f"  {order.name}, {side}: {len(leg.records)} requests in {leg.seconds:.0f} s,"
            f" {tokens / max(leg.seconds, 1e-9):.1f} tokens/s, {failed} failed",
            flush=True,
        )
        self.legs.append(leg)
        return leg

    def check_bursts(self, traffic: Traffic, scale: Scale, profiles: Path) -> Mapping[str, float]:
        """A short leg of its own: a profile slows the engine down."""
        order = phases.profiled(traffic, scale)
        on = self.served[ON]
        found = check_bursts(on, lambda: self.play_on(ON, order), profiles)
        self.legs.pop()
        return found

    def capacity(self, traffic: Traffic, scale: Scale) -> float:
        """Requests/s of mixed traffic that the server without answers in a closed loop."""
        print("capacity of the server without DFlash and DSpark:", flush=True)
        first = phases.calibration(traffic, scale, FIRST_REQUESTS, "first")
        self.play_on(ON, first)
        rough = _rate(self.play_on(OFF, first))
        requests = max(FIRST_REQUESTS, round(rough * scale.calibration))
        found = _rate(self.play_on(OFF, phases.calibration(traffic, scale, requests, "second")))
        self.legs.clear()
        print(f"  capacity: {found:.2f} requests/s", flush=True)
        return found


def _rate(leg: Leg) -> float:
    answered = sum(not it.error for it in leg.records)
    if not answered:
        problem = leg.records[0].error if leg.records else "no answer at all"
        raise LocustError(f"the server without DFlash and DSpark fails: {problem}")
    return answered / leg.seconds


@contextmanager
def resident(options: Options, folder: Path) -> Iterator[Servers]:
    """Both servers, one started after the other."""
    flags = engine_flags(options.scale, options.flags, folder / PROFILES)
    print(f"starting two servers of {options.model}: {' '.join(flags)}", flush=True)
    player = Player(folder, options.doors, options.workers)
    gateway = OPENAI in options.doors
    with (
        serving(options.model, [*flags, *SWITCHES[OFF]], gateway) as off,
        serving(options.model, [*flags, *SWITCHES[ON]], gateway) as on,
    ):
        yield Servers({OFF: off, ON: on}, player)


def engine_flags(scale: Scale, flags: Sequence[str], profiles: Path) -> list[str]:
    """The operator's flags, over what leaves room for two engines on one machine."""
    args: dict[str, object] = {"profiler_config": profiler_config(profiles)}
    if scale.name == "cpu":
        args["max_model_len"] = 2048
    elif _has_gpu():
        args["gpu_memory_utilization"] = 0.42
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--engine-args", type=json.loads, default={})
    given, others = parser.parse_known_args(flags)
    args.update(given.engine_args)
    # No probes of the launcher's own: they would run beside the load.
    return ["--engine-args", json.dumps(args), "--probe-interval", "86400", *others]


def _has_gpu() -> bool:
    import torch  # takes seconds

    return torch.cuda.is_available()


def traffic_of(options: Options, scale: Scale) -> Traffic:
    """Raises LogError, OSError: the operator's log cannot be read."""
    log = () if options.prompts is None else tuple(read_log(options.prompts))
    recipe = Recipe(tokens_of(options.model), limits=scale.limits, max_tokens=scale.max_tokens)
    return Traffic(options.seed, recipe, options.repeat_share, log)


def tokens_of(model: str) -> Count:
    """How many tokens a text has as a user's message."""
    encoder = PromptEncoder(load_tokenizer(resolve_model(model), None, False))
    longest = 1 << 30

    def count(text: str) -> int:
        chat = json.dumps([{"role": "user", "content": text}])
        return len(encoder.from_messages(chat, longest).ids)

    return count


def measure(options: Options) -> bool:
    """The whole test; whether all limits are kept."""
    limits = read_limits(options.limits)
    began = datetime.now(UTC)
    folder = new_folder("run", began)
    with resident(options, folder) as servers:
        scale = options.scale.fitted(servers.context)
        traffic = traffic_of(options, scale)
        capacity = options.capacity or servers.capacity(traffic, scale)
        for order in phases.phases(traffic, Sizes(scale, capacity)):
            servers.play(order)
        bursts = servers.check_bursts(traffic, scale, folder / PROFILES)
    run = Run(
        scale=options.scale.name,
        model=options.model,
        seed=options.seed,
        repeat_share=options.repeat_share,
        prompts="" if options.prompts is None else str(options.prompts),
        doors=options.doors,
        capacity=capacity,
        legs=servers.legs,
        bursts=bursts,
    )
    summary = summarise(run)
    checks = check_all(run, summary, limits)
    where = write(run, summary, checks, OUT, began)
    show(summary, checks)
    print(f"report: {where / 'report.html'}")
    return passed(checks)


def new_folder(name: str, began: datetime) -> Path:
    """Where a run keeps what it sends and gets, before there is a report."""
    folder = OUT / name / began.strftime("%Y%m%dT%H%M%SZ")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def parse(argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="make loadtest", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny-deepseek, path or hub id")
    parser.add_argument("--scale", choices=("auto", *SCALES), default="auto",
                        help="auto: full with a GPU, cpu without")  # fmt: skip
    parser.add_argument("--doors", nargs="+", choices=DOORS,
                        default=[door for door in DOORS if door != OPENAI])  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat-share", type=float, default=0.6)
    parser.add_argument("--prompts", type=Path, help="a log of your own: a JSON object a line")
    parser.add_argument("--workers", type=int, default=0, help="Locust processes beside a master")
    parser.add_argument("--limits", type=Path, default=SLO, help="what must be kept, TOML")
    parser.add_argument("--capacity", type=float, metavar="REQUESTS/S",
                        help="of the server without both, as an earlier run measured it: with its"
                             " seed, the same is sent at the same times")  # fmt: skip
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for both servers")
    given = parser.parse_args(argv)
    if not 0 <= given.repeat_share <= 1:
        parser.error(f"--repeat-share must be from 0 to 1, not {given.repeat_share:g}")
    if given.workers < 0:
        parser.error(f"--workers must not be negative, but is {given.workers}")
    if given.capacity is not None and not 0 < given.capacity < math.inf:
        parser.error(f"--capacity must be over 0, not {given.capacity:g}")
    scale = given.scale
    if scale == "auto":
        scale = "full" if _has_gpu() else "cpu"
    return Options(
        given.model, SCALES[scale], tuple(given.doors), given.seed, given.repeat_share,
        given.prompts, tuple(given.flags), given.workers, given.limits, given.capacity,
    )  # fmt: skip


def command(measure: Callable[[Options], bool], argv: Sequence[str] | None = None) -> int:
    """A load test's exit status: 0 good, 1 a limit is missed, 2 it could not be made."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers as Ctrl-C does
    try:
        return exit_status(lambda: measure(options))
    except (LaunchError, LocustError, ValueError, OSError, RuntimeError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(command(measure))
