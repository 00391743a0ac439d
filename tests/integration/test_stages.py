"""A stage that is called directly, and what its tensors give away."""

import pytest

from tests.integration.raw import Stream, infer, settled, wait_idle
from tests.integration.raw import metric as read_metric


@pytest.mark.parametrize(
    ("model", "fields", "name"),
    [
        ("dflash_cache", {}, "plan"),
        ("dflash_cache", {"plan": b"x" * 200}, "plan"),
        ("dflash_cache", {"message": b"x" * 200}, "message"),
        ("deepseek_decoder", {"plan": b"", "lookup": b""}, "plan"),
        ("deepseek_decoder", {"plan": b"x" * 200, "lookup": b"y" * 200}, "plan"),
        ("deepseek_decoder", {"control": b"abort_all"}, "control"),
        ("deepseek_decoder", {"lookup": b"y"}, "plan"),
    ],
)
def test_called_directly(served, model, fields, name):
    # Triton answers a request without any input by itself.
    fields = fields or {"plan": b""}
    with Stream(served.grpc) as stream:
        stream.send(model, fields)
        outputs, error, _ = stream.next()
    assert outputs is None
    assert error.startswith(f"{name}: ")
    assert "deepseek_flash" in error


def test_a_plan_is_used_once(served):
    """The scheduler's input is any client's, so its plan can be had; it runs once at most."""
    (planned,), error = infer(
        served.grpc,
        {"text_input": "x", "sampling_parameters": '{"max_tokens": 2}'},
        model="dspark_scheduler",
    )
    assert error is None
    plan = planned["plan"][0]
    (found,), _ = infer(served.grpc, {"plan": plan}, model="dflash_cache")
    stages = {"plan": plan, "lookup": found["lookup"][0]}
    first, error = infer(served.grpc, stages, model="deepseek_decoder")
    assert error is None and len(first) == 1
    _, error = infer(served.grpc, stages, model="deepseek_decoder")
    assert error.startswith("plan: was used before")
    tampered = plan[:40] + bytes([plan[40] ^ 1]) + plan[41:]
    _, error = infer(served.grpc, {**stages, "plan": tampered}, model="deepseek_decoder")
    assert error.startswith("plan: not made by this server")
    swapped = {"plan": stages["lookup"], "lookup": plan}
    _, error = infer(served.grpc, swapped, model="deepseek_decoder")
    assert error.startswith("plan: not made by this server")
    wait_idle(served)


def test_metrics_of_the_design(served):
    before = settled(served, "vllm:generation_tokens_total")
    infer(served.grpc, {"text_input": "x", "sampling_parameters": '{"max_tokens": 5}'})
    assert settled(served, "vllm:generation_tokens_total") == before + 5
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert read_metric(served, f"vllm:{name}_seconds_count") > 0
        assert read_metric(served, f"vllm:{name}_seconds_sum") > 0
        whole = read_metric(served, f"vllm:{name}_seconds_bucket", le="+Inf")
        assert whole == read_metric(served, f"vllm:{name}_seconds_count")
    assert read_metric(served, "p95_first_token_latency") > 0
    assert read_metric(served, "avg_tokens_per_second") > 0
    for key in (
        "enable_dflash",
        "dflash_cache_size",
        "dflash_fingerprint_bits",
        "enable_dspark",
        "dspark_burst_steps",
    ):
        assert read_metric(served, "deepseek_flash_config_info", key=key) == 1
