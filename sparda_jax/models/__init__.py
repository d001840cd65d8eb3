"""The decoder (flax nnx, parameters only) and its parts."""

from sparda_jax.models.decoder import Decoder, DecoderLayer

__all__ = ["Decoder", "DecoderLayer"]
