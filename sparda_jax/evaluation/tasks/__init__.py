"""Evaluation tasks: prompts and scores; no model is needed for either."""
