"""Measures of quality and speed."""
