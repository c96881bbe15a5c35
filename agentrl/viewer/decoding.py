"""Decoding of token ids by the tokenizer of a run's or an evaluation's model, without loading a model library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import yaml
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from agentrl.errors import UsageError
from agentrl.evaluation.panel import RESULT_FILE
from agentrl.observe.model_folder import MODEL, find_model
from agentrl.observe.run_folder import RunDirectory, find_run

SCRATCH = "scratch"
"""Model path of a run whose model was created for it."""
TOKENIZER_FILE = "tokenizer.json"
MAX_LOADED = 3
"""Maximum number of cached tokenizers."""
UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""Text that stands for the bytes of an incomplete character."""
MAX_BYTES_PER_CHARACTER = 4
"""Maximum bytes of a UTF-8 character, and so the maximum number of tokens that share one."""


class DecodesIds(Protocol):
    """Tokenizer of the library tokenizers or transformers."""

    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of ids."""


class TokenDecoder:
    """Decoder of token ids.

    Args:
        tokenizer: The tokenizer.
        special: Ids of special tokens.
    """

    def __init__(self, tokenizer: DecodesIds, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.special = special
        self._pieces: dict[int, str] = {}
        self._anchor = self._find_anchor()

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False) if len(ids) else ""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id; a character that spans several tokens is assigned to the last one."""
        found = [self._piece(number) for number in ids]
        start = 0
        while start < len(found):
            if UNDECODED in found[start] and (end := self._end_of_character(ids, found, start)) is not None:
                found[start:end] = ["" for _ in range(end - start - 1)] + [self._after_anchor(list(ids[start:end]))]
                start = end
            else:
                start += 1
        return found

    def _end_of_character(self, ids: Sequence[int], found: Sequence[str], start: int) -> int | None:
        for end in range(start + 2, min(start + MAX_BYTES_PER_CHARACTER, len(ids)) + 1):
            if UNDECODED not in found[end - 1]:
                return None
            if UNDECODED not in self._after_anchor(list(ids[start:end])):
                return end
        return None

    def _piece(self, number: int) -> str:
        text = self._pieces.get(number)
        if text is None:
            text = self._pieces[number] = self._after_anchor([number])
        return text

    def _after_anchor(self, ids: list[int]) -> str:
        """Return the text of ids inside a text: some tokenizers drop the space at its beginning."""
        before, anchored = self._anchor
        whole = self._tokenizer.decode([*before, *ids], skip_special_tokens=False)
        return whole[len(anchored) :] if whole.startswith(anchored) else self.text(ids)

    def _find_anchor(self) -> tuple[list[int], str]:
        for number in range(1000):
            text = self._tokenizer.decode([number], skip_special_tokens=False)
            if number not in self.special and len(text) == 1 and text.isalpha() and text.isascii():
                return [number], text
        return [], ""


def load_decoder(model: str) -> TokenDecoder:
    """Load the decoder of a model folder, or of a model in the cache of the Hugging Face hub.

    Raises:
        UsageError: the tokenizer cannot be loaded.
    """
    file = _tokenizer_file(model)
    try:
        return _load_other(model) if file is None else _load(file.read_bytes())
    except Exception as error:  # the libraries raise many types
        raise UsageError(
            f"cannot load the tokenizer of {model}",
            got=(str(error).strip() or type(error).__name__).splitlines()[0],
            expected=f"a folder with {TOKENIZER_FILE}",
            hint="without it, tokens are shown by their numbers",
        ) from error


@lru_cache(maxsize=MAX_LOADED)
def _load(content: bytes) -> TokenDecoder:
    """Load the content of ``tokenizer.json``; models of one family share a decoder."""
    tokenizer = Tokenizer.from_buffer(content)
    added = tokenizer.get_added_tokens_decoder()
    return TokenDecoder(tokenizer, frozenset(number for number, token in added.items() if token.special))


def _load_other(model: str) -> TokenDecoder:
    """Load a tokenizer that has no ``tokenizer.json``; this library needs seconds and hundreds of megabytes."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=not Path(model).is_dir())
    return TokenDecoder(tokenizer, frozenset(tokenizer.all_special_ids))


def _tokenizer_file(model: str) -> Path | None:
    if Path(model).is_dir():
        file = Path(model) / TOKENIZER_FILE
        return file if file.is_file() else None
    cached = try_to_load_from_cache(model, TOKENIZER_FILE)
    return Path(cached) if isinstance(cached, str) else None


def model_of_run(run: RunDirectory) -> str:
    """Return a model with the tokenizer of a run's episodes: its newest checkpoint, or else its initial model.

    Raises:
        UsageError: the run has neither.
    """
    try:
        return find_model(str(run.path))
    except UsageError:  # no complete checkpoint
        if run.model.is_dir():
            return str(run.model)
        start = _initial_model(run)
        if start is None or start == SCRATCH:
            raise
        return find_model(start)


def _initial_model(run: RunDirectory) -> str | None:
    try:
        path = yaml.safe_load(run.config_file.read_bytes())["model"]["path"]
        return path if isinstance(path, str) else None
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError):
        return None


def model_of_evaluation(folder: Path) -> str:
    """Return the model whose tokenizer wrote an evaluation's episodes.

    Raises:
        UsageError: the evaluation does not name its model, because it is not finished.
    """
    if (folder / MODEL).is_dir():
        return str(folder / MODEL)
    try:
        result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        model = result["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if (run := find_run(folder)) is not None:
            return model_of_run(run)
        raise UsageError(
            f"evaluation {folder} is not finished and does not name its model yet",
            hint="the same agentrl eval command resumes it",
        ) from error
    return str(folder / MODEL) if model == SCRATCH else find_model(str(model))
