"""Where the KV cache lives and how it moves between host and device. Knows nothing of models."""
