"""Settings: the files agree with the code, and what is unknown or malformed is told by name."""

import json
from dataclasses import fields

import pytest
from deepseek_flash import config
from deepseek_flash.config import (
    CONFIGS,
    CacheConfig,
    ConfigError,
    DecoderConfig,
    SchedulerConfig,
    effective,
    model_parameters,
    read_config,
    read_engine_args,
    read_secret,
)

from tests.unit import pbtxt

SETTINGS = [(kind, setting) for kind in CONFIGS.values() for setting in fields(kind)]


def names(cases):
    return [setting.name for _, setting in cases]


# -- the files ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", CONFIGS)
def test_config_pbtxt_and_dataclass_have_the_same_settings_and_values(model):
    assert pbtxt.parameters(model) == effective(CONFIGS[model]())


@pytest.mark.parametrize("model", CONFIGS)
def test_config_pbtxt_can_be_read(model):
    assert read_config(CONFIGS[model], pbtxt.parameters(model), {}) == CONFIGS[model]()


def test_no_two_models_share_a_name_of_a_setting():
    assert len({setting.name for _, setting in SETTINGS}) == len(SETTINGS)


def test_no_setting_has_the_name_of_a_process_variable():
    taken = {config.PREFIX + setting.name.upper() for _, setting in SETTINGS}
    assert not taken & config._PROCESS_NAMES


def test_the_ensemble_has_no_settings():
    assert pbtxt.parameters("deepseek_flash") == {}


# -- reading ---------------------------------------------------------------------------------


def test_defaults():
    assert read_config(SchedulerConfig, {}, {}) == SchedulerConfig()


def test_parameters_and_environment_in_order_of_strength():
    parameters = {"queue_limit": "7", "max_n": "2"}
    found = read_config(SchedulerConfig, parameters, {"DEEPSEEK_FLASH_QUEUE_LIMIT": "9"})
    assert (found.queue_limit, found.max_n, found.max_logprobs) == (9, 2, 20)


@pytest.mark.parametrize("text", ["none", "None", "NONE"])
def test_none(text):
    assert read_config(SchedulerConfig, {"default_seed": text}, {}).default_seed is None


@pytest.mark.parametrize(("text", "value"), [("true", True), ("FALSE", False), ("False", False)])
def test_switches(text, value):
    assert read_config(DecoderConfig, {"enable_dspark": text}, {}).enable_dspark is value


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda:0", "cuda:11"])
def test_device(text):
    assert read_config(CacheConfig, {"device": text}, {}).device == text


@pytest.mark.parametrize(
    "environ",
    [
        {"PATH": "/bin", "VLLM_X": "1", "deepseek_flash_max_n": "x"},
        {"DEEPSEEK_FLASH_SECRET": "ab", "DEEPSEEK_FLASH_RUNTIME_DIR": "/x"},
        {"DEEPSEEK_FLASH_MODEL": "m", "DEEPSEEK_FLASH_ENGINE_ARGS": "{}"},
        {"DEEPSEEK_FLASH_ENABLE_DFLASH": "false"},  # another model's setting
    ],
)
def test_names_in_the_environment_that_are_none_of_this_models_settings(environ):
    assert read_config(SchedulerConfig, {}, environ) == SchedulerConfig()


def test_what_tritons_python_backend_itself_reads_is_let_through():
    parameters = {"EXECUTION_ENV_PATH": "x", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"}
    assert read_config(CacheConfig, parameters, {}) == CacheConfig()


@pytest.mark.parametrize("key", ["queue_limits", "QUEUE_LIMIT", "", "enable_dflash"])
def test_unknown_parameter(key):
    with pytest.raises(ConfigError, match=f"^{key}: unknown parameter"):
        read_config(SchedulerConfig, {key: "1"}, {})


@pytest.mark.parametrize("name", ["QUEUE_LIMITS", "", "queue_limit", "CACHE"])
def test_unknown_environment_variable(name):
    name = f"DEEPSEEK_FLASH_{name}"
    with pytest.raises(ConfigError, match=f"^{name}: unknown environment variable.*QUEUE_LIMIT"):
        read_config(SchedulerConfig, {}, {name: "1"})


def malformed(setting):
    """Texts that are wrong for a setting, by its kind."""
    meta = setting.metadata
    if isinstance(setting.default, bool):
        return ["", "1", "yes", "on", "true "]
    if isinstance(setting.default, str):
        return ["", "gpu", "cuda", "cuda:x", "cpu\n", "CPU"]
    wrong = ["", "x", "1.5", "1e3", "true", "0x10", "1" * 5000, str(2**64), "-1"]
    if setting.type != "int | None":
        wrong.append("none")
    if meta["low"] is not None:
        wrong.append(str(meta["low"] - 1))
    if meta["high"] is not None:
        wrong.append(str(meta["high"] + 1))
    return wrong + ["33"] * bool(meta["choices"])


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=names(SETTINGS))
def test_malformed_values_are_refused_wherever_they_stand(kind, setting):
    variable = config.PREFIX + setting.name.upper()
    for text in malformed(setting):
        with pytest.raises(ConfigError, match=f"^{setting.name}: must "):
            read_config(kind, {setting.name: text}, {})
        with pytest.raises(ConfigError, match=f"^{variable}: must "):
            read_config(kind, {}, {variable: text})


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=names(SETTINGS))
def test_borders_are_allowed(kind, setting):
    meta = setting.metadata
    for value in (meta["low"], meta["high"], *(meta["choices"] or ())):
        if value is not None:
            assert getattr(read_config(kind, {setting.name: str(value)}, {}), setting.name) == value


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=names(SETTINGS))
def test_every_setting_explains_itself(kind, setting):
    assert setting.metadata["help"]
    assert config.default_of(setting) == effective(kind())[setting.name]


# -- texts -----------------------------------------------------------------------------------


def test_effective_settings_can_be_read_again():
    chosen = SchedulerConfig(default_seed=None, queue_limit=3)
    shown = effective(chosen)
    assert (shown["default_seed"], shown["queue_limit"]) == ("none", "3")
    assert effective(DecoderConfig(enable_dspark=False))["enable_dspark"] == "false"
    assert read_config(SchedulerConfig, shown, {}) == chosen


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [({}, {}), ({"parameters": {"a": {"string_value": "1"}}}, {"a": "1"})],
)
def test_parameters_of_tritons_model_configuration(model_config, expected):
    assert model_parameters(json.dumps(model_config)) == expected


# -- engine arguments ------------------------------------------------------------------------


@pytest.fixture
def model_json(tmp_path):
    (tmp_path / "weights").mkdir()
    file = tmp_path / "model.json"
    file.write_text('{"model": "./weights", "max_model_len": 8}')
    return file


def test_a_relative_model_is_found_beside_the_file(model_json):
    args = read_engine_args(model_json, {})
    assert args == {"model": str(model_json.parent / "weights"), "max_model_len": 8}


def test_the_environment_lies_over_the_file(model_json):
    environ = {
        "DEEPSEEK_FLASH_ENGINE_ARGS": '{"max_model_len": 16, "seed": 1, "model": "other"}',
        "DEEPSEEK_FLASH_MODEL": "org/name",
    }
    assert read_engine_args(model_json, environ) == {
        "model": "org/name", "max_model_len": 16, "seed": 1,
    }  # fmt: skip
    del environ["DEEPSEEK_FLASH_MODEL"]
    assert read_engine_args(model_json, environ)["model"] == "other"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not valid JSON"), (b"", "not valid JSON"), (b"[]", "must be a JSON object"),
        (b"\xff\xfe\xff", "not valid JSON"), (b"[" * 100_000, "not valid JSON"),
        (b"{}", "model: missing"), (b'{"model": ""}', "model: missing"),
        (b'{"model": 5}', "model: missing"), (b'{"model": "./nowhere"}', "does not exist"),
        (b'{"model": "/no/where"}', "does not exist"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_bad_model_json(tmp_path, content, problem):
    file = tmp_path / "model.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_engine_args(file, {})


def test_no_model_json(tmp_path):
    with pytest.raises(ConfigError, match=r"model.json: No such file"):
        read_engine_args(tmp_path / "model.json", {})


@pytest.mark.parametrize("overlay", ["", "{", "[]", "5"])
def test_a_bad_overlay(model_json, overlay):
    with pytest.raises(ConfigError, match=r"^DEEPSEEK_FLASH_ENGINE_ARGS: "):
        read_engine_args(model_json, {"DEEPSEEK_FLASH_ENGINE_ARGS": overlay})


# -- the secret ------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", "ab" * 15, "xy" * 16, "abc"])
def test_a_short_or_malformed_secret_is_refused(secret):
    with pytest.raises(ConfigError, match=r"^DEEPSEEK_FLASH_SECRET: "):
        read_secret({"DEEPSEEK_FLASH_SECRET": secret})


def test_a_secret():
    assert read_secret({}) is None
    assert read_secret({"DEEPSEEK_FLASH_SECRET": "ab" * 16}) == b"\xab" * 16
