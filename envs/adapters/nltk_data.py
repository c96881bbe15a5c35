"""Error for corpora of `nltk` that word games of other libraries need."""

from __future__ import annotations

import re

from agentrl.errors import UsageError

_RESOURCE = re.compile(r"Resource (?:\x1b\[\d+m)?(\w+)")


def missing_corpus(what: str, error: LookupError) -> UsageError:
    """Return the error for a corpus that `nltk` did not find.

    >>> missing_corpus("the game X", LookupError("Resource words not found.")).got
    'no words'
    """
    return UsageError(
        f"{what} needs data of nltk",
        got=f"no {' or '.join(_RESOURCE.findall(str(error))) or error}",
        hint="download it: python -m nltk.downloader words averaged_perceptron_tagger_eng",
    )
