"""Made-up load tests for the tests of the report."""

from loadtest.records import BURST, CLOSED, MIXED, OFF, ON, OPEN, WARM_UP, Leg, Moment, Record, Run

STAGES = ("dspark_scheduler", "dflash_cache", "deepseek_decoder")


def record(number=0, due=0.0, first=0.5, ended=1.0, **others):
    known = {"sent": due, "tokens": 10, "prompt_tokens": 8, "door": "grpc", **others}
    return Record(number=number, due=due, first=first, ended=ended, **known)


def failed(error, **others):
    return record(first=None, tokens=0, prompt_tokens=0, error=error, **others)


def published(beats=1.0, more=None):
    """A server's metrics."""
    beating = dict.fromkeys(STAGES, float(beats))
    return {"deepseek_flash_heartbeat_total": beating, **(more or {})}


def leg(phase=MIXED, loop=CLOSED, side=ON, records=None, **others):
    records = [record()] if records is None else records
    values = {
        "part": 0, "users": 4, "rate": 0.0 if loop == CLOSED else 2.5, "digest": "d1",
        "planned": len(records), "seconds": 10.0, "before": published(1), "after": published(5),
        "moments": (), "locust_cpu": 0.1, "idle_cpu": 0.01, **others,
    }  # fmt: skip
    return Leg(phase=phase, loop=loop, side=side, records=records, **values)


def moment(at, memory=2**30, more=None):
    return Moment(at, published(2, more), memory)


def run(*legs, **others):
    values = {
        "scale": "cpu", "model": "smollm2", "seed": 7, "repeat_share": 0.6, "prompts": "",
        "doors": ("grpc", "generate_stream"), "capacity": 3.5, "bursts": {}, **others,
    }  # fmt: skip
    return Run(legs=legs, **values)


def whole_run(**others):
    """Every phase on both sides; nothing is wrong with it, and "on" is twice as fast."""
    legs = []
    places = ((WARM_UP, CLOSED), (MIXED, CLOSED), (MIXED, OPEN), (BURST, CLOSED))
    for beats, (phase, loop) in enumerate(places):
        for side, seconds in ((OFF, 1.0), (ON, 0.5)):
            counts = {
                "vllm:generation_tokens_total": {"": 20.0},
                "dspark_tokens_total": {"slow": 20.0},
            }
            if side == ON:
                counts["dspark_tokens_total"] = {"fast": 12.0, "burst": 3.0, "slow": 5.0}
                counts["dflash_lookups_total"] = {"exact": 8.0, "window": 1.0, "miss": 1.0}
            records = [record(n, 0.0, seconds * 0.4, seconds, gaps=(0.02,)) for n in range(2)]
            legs.append(
                leg(
                    phase, loop, side, records, seconds=10.0 * seconds,
                    before=published(5 * beats),
                    moments=(Moment(6.0 * seconds, published(5 * beats + 2, counts), 2**30),),
                    after=published(5 * beats + 4, counts),
                )
            )  # fmt: skip
    return run(*legs, **others)
