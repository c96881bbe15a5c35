"""Word games of other libraries need corpora that `nltk` downloads."""

from __future__ import annotations

import re

from agentrl.errors import UsageError

_RESOURCE = re.compile(r"Resource (?:\x1b\[\d+m)?(\w+)")


def missing_corpus(what: str, error: LookupError) -> UsageError:
    """What to say where `nltk` looked for a corpus in vain.

    >>> missing_corpus("the game X", LookupError("Resource words not found.")).got
    'no words'
    """
    return UsageError(
        f"{what} needs data of nltk",
        got=f"no {' or '.join(_RESOURCE.findall(str(error))) or error}",
        hint="get it: python -m nltk.downloader words averaged_perceptron_tagger_eng",
    )
