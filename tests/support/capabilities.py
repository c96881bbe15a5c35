"""pytest plugin that prints what collected tests prove by their marker, for docs/capability_tables.py.

``capability(SUBJECT, *FEATURES, refused=False, without=())``: the test proves that the subject has the features or, if
refused, that each is an error that says so. Subject and features may name parameters of the test in braces; a list is
short for several markers. `without` is a parameter that holds features to leave out.
"""

from __future__ import annotations

import json

import pytest

PREFIX = "capability "
"""Prefix of the printed lines, each a JSON list of subject, feature and whether it is refused."""


def claims_of(item: pytest.Item) -> set[tuple[str, str, bool]]:
    """Return subject, feature and refusal of each capability that a test proves."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    found = set()
    for mark in item.iter_markers("capability"):
        subject, *features = mark.args
        left_out = params[mark.kwargs["without"]] if "without" in mark.kwargs else ()
        for one in [subject] if isinstance(subject, str) else subject:
            for feature in {feature.format(**params) for feature in features} - set(left_out):
                found.add((one.format(**params), feature, mark.kwargs.get("refused", False)))
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print the claims of all collected tests."""
    for claim in sorted({claim for item in session.items for claim in claims_of(item)}):
        print(f"\n{PREFIX}{json.dumps(claim)}", end="")
    print()
