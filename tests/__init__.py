"""A package, so that the `tests` which verl installs does not stand in its place."""
