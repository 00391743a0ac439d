"""The first layers alone against the whole model, on tiny random checkpoints of each family."""

import json
import logging

import pytest
import torch
from deepseek_flash.dflash.encoder import EncoderUnsupported, PrefixEncoder
from deepseek_flash.dflash.encoder_process import EncoderProcess
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LAYERS, VOCABULARY = 5, 64
IDS = [7, 63, 0, 21, 21, 5, 40, 3, 9]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
FAMILIES = {
    "llama": {"num_key_value_heads": 1},
    "deepseek_v2": {**MLA, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**MLA, "q_lora_rank": 16, "first_k_dense_replace": 3},
}


def build(family, options, directory):
    """A random checkpoint, written to ``directory``; returns the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    return model


def add_mtp_layer(directory):
    """As in DeepSeek's checkpoints: one layer more than ``num_hidden_layers`` says."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    last = f"model.layers.{LAYERS - 1}."
    copies = {name.replace(last, f"model.layers.{LAYERS}."): tensor.clone()
              for name, tensor in weights.items() if name.startswith(last)}  # fmt: skip
    copies[f"model.layers.{LAYERS}.eh_proj.weight"] = torch.ones(32, 64)
    save_file({**weights, **copies}, path, {"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> directory and whole model."""
    made = {}
    for family, options in FAMILIES.items():
        directory = tmp_path_factory.mktemp(family)
        made[family] = directory, build(family, {**SIZES, **options}, directory)
    add_mtp_layer(made["deepseek_v3"][0])
    return made


def whole(model, ids, layers):
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return states.hidden_states[layers][0, -1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_is_the_whole_models(checkpoints, family, layers, device):
    directory, model = checkpoints[family]
    encoder = PrefixEncoder.load(str(directory), device=torch.device(device), layers=layers)
    assert (encoder.hidden_size, encoder.layers, encoder.window) == (32, layers, 512)
    for ids in (IDS, IDS[:1], tuple(IDS)):
        state = encoder.encode(ids)
        assert state.shape == (32,) and state.dtype == torch.float32
        assert state.device.type == device
        torch.testing.assert_close(state.cpu(), whole(model, ids, layers), rtol=0, atol=1e-5)
    assert not torch.allclose(whole(model, IDS, layers), whole(model, IDS, layers + 1), atol=0.01)


def test_only_the_window_counts(checkpoints):
    directory, model = checkpoints["llama"]
    encoder = PrefixEncoder.load(str(directory), device=CPU, window=4)
    state = encoder.encode(IDS)
    assert torch.equal(state, encoder.encode([1, 2, *IDS[-4:]]))
    torch.testing.assert_close(state, whole(model, IDS[-4:], 3), rtol=0, atol=1e-5)
    assert not torch.allclose(state, whole(model, IDS, 3), atol=0.01)


def test_the_state_holds_no_other_memory(checkpoints):
    encoder = PrefixEncoder.load(str(checkpoints["llama"][0]), device=CPU)
    assert encoder.encode(IDS).untyped_storage().nbytes() == 32 * 4


def test_only_the_first_layers_are_there_and_narrow_weights_become_float32(tmp_path):
    model = build("llama", {**SIZES, "dtype": "bfloat16"}, tmp_path)
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    inner = PrefixEncoder.load(str(tmp_path), device=CPU, layers=2)._model
    assert {parameter.dtype for parameter in inner.parameters()} == {torch.float32}
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert sum(p.numel() for p in inner.parameters()) == VOCABULARY * 32 + 2 * layer


@pytest.fixture
def library_log(caplog, monkeypatch):
    """What ``transformers`` logs."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


@pytest.mark.parametrize("bars", [True, False])
def test_loading_is_silent_and_leaves_the_settings(checkpoints, library_log, capfd, bars):
    from transformers.utils import logging as library

    library.enable_progress_bar() if bars else library.disable_progress_bar()
    PrefixEncoder.load(str(checkpoints["deepseek_v3"][0]), device=CPU)
    assert not library_log.records and capfd.readouterr() == ("", "")
    assert library.is_progress_bar_enabled() == bars
    assert not logging.getLogger("transformers.modeling_utils").filters


def test_fp8_weights_are_dequantised(tmp_path, library_log):
    options = {**SIZES, **FAMILIES["deepseek_v3"]}
    model = build("deepseek_v3", options, tmp_path)
    weights = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if tensor.ndim == 2 and "proj" in name:  # smaller than a block of 128 x 128: one scale
            scale = tensor.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
            weights[name] = (tensor / scale).to(torch.float8_e4m3fn)
        else:
            weights[name] = tensor.bfloat16()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    library_log.clear()
    state = PrefixEncoder.load(str(tmp_path), device=CPU).encode(IDS)
    assert not library_log.records  # on a CPU the library would do it unasked, with a warning
    assert torch.cosine_similarity(state, whole(model, IDS, 3), dim=0) > 0.95


def test_another_family_is_named(tmp_path):
    build("gpt2", {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2}, tmp_path)
    with pytest.raises(EncoderUnsupported, match="family 'gpt2' is not one of llama"):
        PrefixEncoder.load(str(tmp_path), device=CPU)


@pytest.mark.parametrize("layers", [LAYERS + 1, LAYERS + 2])
def test_an_mtp_layer_is_no_decoder_layer(checkpoints, layers):
    with pytest.raises(EncoderUnsupported, match=f"{layers} layers wanted, 5 there"):
        PrefixEncoder.load(str(checkpoints["deepseek_v3"][0]), device=CPU, layers=layers)


def without_a_weight(directory):
    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})


def with_nan(directory):
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][0] = torch.nan
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda directory: (directory / "config.json").unlink(), "does not load: "),
        (lambda directory: (directory / "config.json").write_text("{"), "does not load: "),
        (lambda directory: (directory / "config.json").write_text("{}"), "does not load: "),
        (lambda directory: (directory / "model.safetensors").unlink(), "does not load: OSError"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"8"), "does not load: "),
        (without_a_weight, r"no weights for layers\.1\.mlp\.up_proj\.weight"),
        (with_nan, "states are not finite"),
    ],
)
def test_what_does_not_load_is_unsupported_in_one_line(tmp_path, damage, reason):
    build("llama", SIZES, tmp_path)
    damage(tmp_path)
    with pytest.raises(EncoderUnsupported, match=reason) as raised:
        PrefixEncoder.load(str(tmp_path), device=CPU)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("ids", [[], [VOCABULARY], [-1]])
def test_bad_tokens_are_refused(checkpoints, ids):
    encoder = PrefixEncoder.load(str(checkpoints["llama"][0]), device=CPU)
    with pytest.raises(ValueError, match="token_ids: must be 1 or more, each below 64"):
        encoder.encode(ids)


@pytest.mark.parametrize("options", [{"layers": 0}, {"window": 0}])
def test_bad_sizes_are_refused(options):
    with pytest.raises(ValueError, match="must be at least 1"):
        PrefixEncoder.load("nowhere", device=CPU, **options)


# -- in a process of its own -----------------------------------------------------------------


def test_another_process_gives_the_same_states_and_its_end_is_told(checkpoints):
    path = str(checkpoints["llama"][0])
    other = EncoderProcess(path, device=CPU, window=8)
    here = PrefixEncoder.load(path, device=CPU, window=8)
    assert other.hidden_size == here.hidden_size
    for ids in ([1], [3, 5, 7, 9]):
        assert torch.equal(other.encode(ids), here.encode(ids))
        assert 0 < other.cost < 60 and 0 < here.cost < 60
    with pytest.raises(ValueError, match="token_ids"):
        other.encode([])
    assert torch.equal(other.encode([1]), here.encode([1])), "a bad request is not its end"
    other._process.kill()
    with pytest.raises((OSError, EOFError)):
        other.encode([1])
    other.close()


def test_a_process_that_cannot_encode_says_why(tmp_path):
    with pytest.raises(EncoderUnsupported, match="nowhere"):
        EncoderProcess(str(tmp_path / "nowhere"), device=CPU)
