"""The one error a user can cause: a single line that names the field; the command exits with status 2."""

import math


class BadInput(ValueError):
    """Input that cannot be used as given. The message is one line and names the field."""


def positive(field: str, value: float) -> None:
    """Raises BadInput where `value` is not finite and > 0."""
    if not 0 < value < math.inf:
        raise BadInput(f"{field} is {value}, expected a finite number > 0")
