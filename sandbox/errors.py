"""The one error a user can cause: a single line that names the field; the command exits with status 2."""


class BadInput(ValueError):
    """Input that cannot be used as given. The message is one line and names the field."""
