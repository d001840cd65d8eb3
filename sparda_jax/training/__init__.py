"""Training machinery: optimizer steps over micro-batches and devices, a run in a folder."""
