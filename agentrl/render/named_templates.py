"""The choice among the chat templates of a tokenizer that has several under names, such as Hermes 2 Pro and Command R.

transformers takes ``tool_use`` where tools are offered, and ``default`` otherwise. The token ledger appends to what one
template rendered, so a run keeps to one template: ``tool_use``, if it also shows conversations without tools.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agentrl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_log = logging.getLogger(__name__)
NAMES = ("tool_use", "default")
"""The names of templates that are taken, in order."""
_PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"})


def choose_chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a tokenizer's chat template; of several, the one that shows conversations with tools and without.

    Raises:
        TemplateError: the tokenizer has none, or only templates under other names.
    """
    template: object = tokenizer.chat_template
    if isinstance(template, str):
        return template
    if not isinstance(template, dict) or not template:
        raise TemplateError(
            "the tokenizer has no chat template",
            got=type(template).__name__,
            expected="a template in tokenizer.chat_template",
            hint="use the model's instruction-tuned variant, or set model.chat_template",
        )
    rendered = {name: _rendered(tokenizer, template[name]) for name in NAMES if isinstance(template.get(name), str)}
    if not rendered:
        raise TemplateError(
            "the tokenizer has several chat templates, and none of them is the usual one",
            got=f"templates named {', '.join(sorted(map(str, template)))}",
            expected=f"one named {' or '.join(NAMES)}",
            hint="set model.chat_template to the file of the template that the model was trained with",
        )
    chosen = next((name for name, text in rendered.items() if text is not None), next(iter(rendered)))
    differs = "default" in rendered and rendered["default"] != rendered[chosen]
    _log.info(
        "of the tokenizer's chat templates (%s), %s is taken%s",
        ", ".join(sorted(map(str, template))),
        chosen,
        "; without tools, it shows conversations differently from default" if differs else "",
    )
    return str(template[chosen])


def _rendered(tokenizer: PreTrainedTokenizerFast, template: str) -> str | None:
    """Return a conversation without tools; ``None`` if the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template([*_PROBE], chat_template=template, tokenize=False))
    except Exception:
        return None
