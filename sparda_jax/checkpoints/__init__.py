"""Readers for published model weights, one module a format (``checkpoints.gguf``, ...)."""
