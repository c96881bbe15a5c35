"""Whether two models read the same tokens: what one has written, or is asked about, means the same to the other."""

from __future__ import annotations

from agentrl.assembly.models import load_tokenizer
from agentrl.errors import ConfigError


def check_same_tokens(what: str, path: str, model_path: str) -> None:
    """Check that a model has the policy's tokens: the same ids for the same pieces of text.

    Args:
        what: The model, for the message: ``the teacher``.
        path: Its folder or name.
        model_path: The policy's.

    Raises:
        ConfigError: they have different tokens; shows the first that differs.
        UsageError: one has no tokenizer.
    """
    if path == model_path:
        return
    own, other = (
        {number: piece for piece, number in load_tokenizer(at).get_vocab().items()} for at in (model_path, path)
    )
    apart = sorted(number for number in own.keys() | other.keys() if own.get(number) != other.get(number))
    if apart:
        first = apart[0]
        raise ConfigError(
            f"{what} has another tokenizer than the policy, so that its tokens are other text",
            got=f"{len(apart)} ids that differ; id {first} is {_piece(other.get(first))} for {path} "
            f"and {_piece(own.get(first))} for {model_path}",
            expected="the same pieces under the same ids",
            hint="take a model of the policy's own family, or a run that started from the same model",
        )


def _piece(piece: str | None) -> str:
    return "nothing" if piece is None else repr(piece)
