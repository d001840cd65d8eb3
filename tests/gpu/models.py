"""The small model of the engine's tests on GPUs."""

from sparda_jax.config import ModelConfig, RopeConfig


def small_model(vocab_size):
    """Heads of 128 channels, as the kernels want them; room for a few thousand tokens."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        rope=RopeConfig(128),
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
