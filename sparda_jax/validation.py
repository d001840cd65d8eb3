"""Checks of configuration values; errors name the value and the limit."""

from __future__ import annotations

from typing import get_args


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_choice(name: str, value: object, choices: object) -> None:
    """Raises ValueError unless `value` is one of a `Literal` type's."""
    allowed = get_args(choices)
    require(value in allowed, f"unknown {name} {value!r}, expected one of {', '.join(allowed)}")


def require_at_least(name: str, value: float, least: float) -> None:
    """Raises ValueError unless `value` is `least` or more."""
    require(value >= least, f"{name} must be at least {least}, got {value}")
