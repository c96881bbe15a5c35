"""The shipped agent loops; each is a plug-in like any other."""

PLUGINS: dict[str, dict[str, str]] = {}
