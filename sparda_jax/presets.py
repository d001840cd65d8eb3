"""Published models by name, as the `config.json` they come with.

Shapes are those of our specifications, which say where each was read; what they could not confirm
is noted at the model. For real weights the checkpoint's own `config.json` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# LongRoPE divisors of MiniCPM4.1-8B, spec/sparda.md sec. 1.3.
# fmt: off
_MINICPM4_1_FACTORS = [
    0.9982316082870437, 1.033048153422584, 1.0749920956484724, 1.1255096879436193,
    1.1863348602111476, 1.259543828902579, 1.3476188888731149, 1.4535223827776373,
    1.5807816745852985, 1.7335856049489526, 1.9168922912975785, 2.1365471404135326,
    2.3994084200118646, 2.713475511863602, 3.0880118452194134, 3.533650295140154,
    4.062463396503134, 4.687974098908333, 5.425075306704039, 6.289818967956352,
    7.29902962722721, 8.6357018163639, 10.210822723989212, 12.053807765671676,
    14.193944598909404, 16.65780676784363, 19.463620727694074, 22.628311203524586,
    26.150106147261315, 30.02526691405111, 34.23183327975347, 38.73811934094828,
    43.502489489729555, 48.47627117965394, 53.61139491762471, 58.857366522037935,
    64.16798299215064, 69.51359464319125, 74.86555458220285, 80.21497790341579,
    85.55322183307433, 90.89611806932027, 96.26245306514224, 101.68269304046481,
    107.18619510219668, 112.82253283014026, 118.63764063163615, 119.88866203644656,
    120.9462882391725, 121.837565139014, 122.58663780572562, 123.2147719894291,
    123.74049454862576, 124.17980424685767, 124.54641761955492, 124.85202548028222,
    125.10654406389756, 125.31835105170659, 125.49450117164764, 125.64091910903052,
    125.76256945356558, 125.86360463815589, 125.94749252260765, 126.01712561287873,
]
# fmt: on


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    common = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
    return {"model_type": model_type, "architectures": [architecture]} | common | fields


def _shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **fields: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
    } | fields


def _sdar(shape: tuple[int, int, int, int, int], *, block_size: int) -> dict[str, Any]:
    return _config(
        "sdar",
        "SDARForCausalLM",
        **_shape(*shape, 151936),
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=151643,
        eos_token_id=151643,
        mask_token_id=151669,
        block_size=block_size,
    )


def _fast_dllm(shape: tuple[int, int, int, int, int, int], *, tied: bool) -> dict[str, Any]:
    return _config(
        "Fast_dLLM_Qwen",
        "Fast_dLLM_QwenForCausalLM",
        **_shape(*shape),
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        bos_token_id=151643,
        eos_token_id=151645,
        bd_size=32,
        layer_types=["full_attention"] * shape[2],
    )


_MINICPM_SHAPE = _shape(4096, 16384, 32, 32, 2, 73448)
_QWEN = {"rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151645}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # spec/sparda.md, sec. 1.1
    "minicpm4.1-8b": _config(
        "minicpm",
        "MiniCPMForCausalLM",
        **_MINICPM_SHAPE,
        rope_scaling={
            "rope_type": "longrope",
            "long_factor": _MINICPM4_1_FACTORS,
            "short_factor": _MINICPM4_1_FACTORS,
            "original_max_position_embeddings": 65536,
        },
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
        bos_token_id=1,
        eos_token_id=[2, 73440],
    ),
    # spec/sparda.md, sec. 2. Heads, KV heads and head_dim are certain; layers, widths, vocabulary
    # and eps are not published with the code: MiniCPM4.1's stand for them.
    "nosa-8b": _config(
        "llama",
        "SparseLlamaForCausalLM",
        **_MINICPM_SHAPE,
        rope_theta=10000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=[2, 73440],
        sparse_config={
            "kernel_size": 32,
            "kernel_stride": 16,
            "init_blocks": 1,
            "block_size": 64,
            "window_size": 1024,
            "select_blocks": 24,
            "topk": 80,
            "dense_len": 8192,
        },
    ),
    # spec/herald.md, sec. 2.4; the 1.7B's shape is Qwen3-1.7B's, its config was not read.
    "sdar-1.7b-chat": _sdar((2048, 6144, 28, 16, 8), block_size=4),
    "sdar-4b-chat": _sdar((2560, 9728, 36, 32, 8), block_size=4),
    "sdar-8b-chat": _sdar((4096, 12288, 36, 32, 8), block_size=4),
    "sdar-8b-chat-b32": _sdar((4096, 12288, 36, 32, 8), block_size=32),
    # spec/herald.md, sec. 2.3
    "fast-dllm-v2-1.5b": _fast_dllm((1536, 8960, 28, 12, 2, 151936), tied=True),
    "fast-dllm-v2-7b": _fast_dllm((3584, 18944, 28, 28, 4, 152064), tied=False),
    # spec/herald.md, sec. 2.5
    "llada2.0-mini": _config(
        "llada2_moe",
        "LLaDA2MoeModelLM",
        **_shape(2048, 5120, 20, 16, 4, 157184),
        rope_theta=600000,
        partial_rotary_factor=0.5,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        use_qk_norm=True,
        use_qkv_bias=False,
        use_bias=False,
        num_experts=256,
        num_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        moe_intermediate_size=512,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        score_function="sigmoid",
        router_dtype="fp32",
        moe_router_enable_expert_bias=True,
        norm_topk_prob=True,
        pad_token_id=156892,
        eos_token_id=156892,
    ),
    # Plain decoders, from their published config.json.
    "llama-3.1-8b": _config(
        "llama",
        "LlamaForCausalLM",
        **_shape(4096, 14336, 32, 32, 8, 128256, rms_norm_eps=1e-5),
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
    ),
    "smollm2-135m": _config(
        "llama",
        "LlamaForCausalLM",
        **_shape(576, 1536, 30, 9, 3, 49152, head_dim=64, rms_norm_eps=1e-5),
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen2.5-7b": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        **_shape(3584, 18944, 28, 28, 4, 152064),
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        **_QWEN,
    ),
    "qwen3-8b": _config(
        "qwen3",
        "Qwen3ForCausalLM",
        **_shape(4096, 12288, 36, 32, 8, 151936),
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        **_QWEN,
    ),
}
