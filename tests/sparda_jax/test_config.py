import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.checkpoints.assemble import abstract_parameters
from sparda_jax.checkpoints.names import layout
from sparda_jax.config import EngineConfig, ModelConfig, RopeConfig, SamplingParams, SparseConfig
from sparda_jax.presets import PRESETS

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MINICPM = LLAMA | {
    "model_type": "minicpm",
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [1.5, 3.0],
    "original_max_position_embeddings": 16,
}


def parse(**changes):
    return ModelConfig.from_huggingface(LLAMA | changes)


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: SparseConfig(init_blocks=1, local_blocks=8, budget_blocks=9),
            r"budget of 9 blocks is smaller than the 10 forced blocks .*init 1 \+ local 8",
        ),
        (lambda: SparseConfig(geometry=BlockGeometry(60, 32, 16)), "60 is not a multiple of .*16"),
        (lambda: SparseConfig(init_blocks=-1), "init_blocks must be at least 0, got -1"),
        (lambda: SparseConfig(local_blocks=-2), "local_blocks must be at least 0, got -2"),
        (lambda: SparseConfig(dense_len=-1), "dense_len must be at least 0, got -1"),
        (lambda: SamplingParams(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (lambda: SamplingParams(temperature=-0.1), "temperature .* got -0.1"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature .* got nan"),
        (lambda: SamplingParams(top_k=-1), "top_k must be at least 0, got -1"),
        (lambda: SamplingParams(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (lambda: SamplingParams(top_p=1.1), r"top_p must be in \(0, 1\], got 1.1"),
        (lambda: SamplingParams(seed=-1), "seed .* got -1"),
        (
            lambda: SamplingParams(stop_token_ids=(3, -1)),
            "stop token id must be at least 0, got -1",
        ),
        (lambda: EngineConfig(mode="fast"), "unknown mode 'fast', expected one of dense, sparse"),
        (lambda: EngineConfig(offload="disk"), "unknown offload 'disk'"),
        (lambda: EngineConfig(fetch="lazy"), "unknown fetch 'lazy'"),
        (lambda: EngineConfig(prefill_chunk=0), "prefill_chunk must be at least 1, got 0"),
        (lambda: EngineConfig(steps_per_call=0), "steps_per_call must be at least 1, got 0"),
        (lambda: EngineConfig(host_kv_bytes=0), "host_kv_bytes must be at least 1, got 0"),
        (lambda: RopeConfig(head_dim=7), "even, positive head_dim, got 7"),
    ],
)
def test_bad_value_is_named(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_smallest_budget_is_the_forced_blocks():
    assert SparseConfig(init_blocks=2, local_blocks=3, budget_blocks=6).forced_blocks == 6


def test_with_all_blocks_covers_the_length():
    sparse = SparseConfig(budget_blocks=24)
    assert sparse.with_all_blocks(64 * 30 + 1).budget_blocks == 31
    assert sparse.with_all_blocks(1).budget_blocks == sparse.forced_blocks


def test_llama_defaults_are_the_documented_ones():
    config = parse()
    assert (config.head_dim, config.rope.theta, config.tie_word_embeddings) == (4, 10000.0, None)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)
    assert parse(num_key_value_heads=None).num_kv_heads == 4
    assert parse(eos_token_id=[5, 7]).eos_token_ids == (5, 7)
    assert parse(eos_token_id=5).eos_token_ids == (5,)
    assert parse(head_dim=8).head_dim == 8


def test_biases_are_honoured():
    config = parse(attention_bias=True, mlp_bias=True)
    assert config.qkv_bias and config.output_bias and config.mlp_bias
    qwen2 = parse(model_type="qwen2", rope_theta=1e6)
    assert qwen2.qkv_bias and not qwen2.output_bias and not qwen2.qk_norm
    assert parse(model_type="qwen3", rope_theta=1e6).qk_norm


def test_newer_releases_keep_theta_among_the_rope_parameters():
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5


def test_longrope_attention_factor():
    # sqrt(1 + ln(64/16) / ln(16)) = sqrt(1.5)
    assert parse(rope_scaling=LONGROPE).rope.attention_factor == pytest.approx(1.5**0.5)
    same = LONGROPE | {"original_max_position_embeddings": 64}
    assert parse(rope_scaling=same).rope.attention_factor == 1.0
    stated = LONGROPE | {"attention_factor": 1.25}
    assert parse(rope_scaling=stated).rope.attention_factor == 1.25


MOE = PRESETS["llada2.0-mini"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 32}, "sliding_window = 32"),
        (
            {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True},
            "sliding_window = 32",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads = "),
        (MOE | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        (MOE | {"moe_shared_expert_intermediate_size": 1024}, "1024 is not supported, only .* 512"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"dim_model_base": 8}, "dim_model_base = 8"),
        ({"rope_scaling": LONGROPE | {"short_mscale": 1.1}}, "rope short_mscale = 1.1"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(changes, message):
    with pytest.raises(NotImplementedError, match=message) as error:
        parse(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 32},
        {
            "model_type": "qwen3",
            "rope_theta": 1e6,
            "sliding_window": 32,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
        {"final_logit_softcapping": None},
        {"use_qk_norm": False},
        {"torch_dtype": "bfloat16", "transformers_version": "4.50"},
        # As old releases of transformers wrote them into every file.
        {"id2label": {"0": "LABEL_0"}, "pruned_heads": {}, "max_length": 20, "temperature": 1.0},
        {"embd_pdrop": 0.1, "router_aux_loss_coef": 0.001, "chunk_size_feed_forward": 0},
    ],
)
def test_inactive_fields_are_accepted(changes):
    assert parse(**changes).num_layers == 2


@pytest.mark.parametrize(
    "config, message",
    [
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size is missing"),
        (LLAMA | {"num_hidden_layers": "2"}, "num_hidden_layers must be an integer, got '2'"),
        (LLAMA | {"hidden_size": 18}, "18 is not a multiple of 4"),
        (LLAMA | {"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        (LLAMA | {"model_type": "qwen3"}, "rope_theta is missing"),
        ({k: v for k, v in MINICPM.items() if k != "scale_emb"}, "scale_emb is missing"),
        (LLAMA | {"rope_scaling": {"factor": 8.0}}, "without a rope_type"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope low_freq_factor is missing",
        ),
        (
            LLAMA | {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            "long_factor has 1 values, head_dim 4 needs 2",
        ),
    ],
)
def test_missing_or_impossible_value(config, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_huggingface(config)


def test_minicpm_arithmetic():
    config = ModelConfig.from_huggingface(MINICPM)
    assert config.embedding_scale == 12
    assert config.residual_scale == pytest.approx(1.4 / 2**0.5)
    assert config.logit_divisor == 2


@pytest.mark.parametrize(
    "name, tensors, parameters",
    [
        ("minicpm4.1-8b", 291, 8_185_253_888),  # spec, sec. 1.1: 8.185B
        ("nosa-8b", 291 + 2 * 32, 8_185_253_888 + 32 * (2 + 2 * 256)),
        ("sdar-1.7b-chat", 311, 2_031_739_904),
        ("sdar-4b-chat", 399, 4_411_424_256),
        ("sdar-8b-chat", 399, 8_190_735_360),
        ("fast-dllm-v2-1.5b", 338, 1_543_714_304),
        ("fast-dllm-v2-7b", 339, 7_615_616_512),
        ("llada2.0-mini", 14_813, 16_255_643_392),
        ("llama-3.1-8b", 291, 8_030_261_248),
        ("smollm2-135m", 272, 134_515_008),
        ("qwen2.5-7b", 339, 7_615_616_512),
        ("qwen3-8b", 399, 8_190_735_360),
    ],
)
def test_presets_have_the_published_size_without_memory(name, tensors, parameters):
    config = ModelConfig.preset(name)
    shapes = abstract_parameters(config, jnp.bfloat16)
    assert sum(leaf.size for leaf in shapes.values()) == parameters
    stored = layout(config, {path: leaf.shape for path, leaf in shapes.items()}).values()
    assert len({tensor for where in stored for tensor in where.names}) == tensors
    # A router, and NOSA's importance, stay in float32.
    wide = {path[-2] for path, leaf in shapes.items() if leaf.dtype != jnp.bfloat16}
    assert wide <= {"router", "importance", "delta"}


def test_unknown_preset():
    with pytest.raises(ValueError, match="unknown model 'gpt', expected one of minicpm4"):
        ModelConfig.preset("gpt")


def test_minicpm4_1_arithmetic():
    config = ModelConfig.preset("minicpm4.1-8b")
    assert config.residual_scale == pytest.approx(0.247487, abs=1e-6)
    assert config.logit_divisor == 16


def test_configs_are_hashable_and_equal_by_value():
    config = ModelConfig.preset("minicpm4.1-8b")
    assert hash(config) == hash(dataclasses.replace(config))
    assert config == dataclasses.replace(config)
