"""Choice of a chat template for tokenizers with several named templates, such as Hermes 2 Pro and Command R.

transformers uses ``tool_use`` if tools are offered, and ``default`` otherwise. The token ledger appends to the text of
one template, so a run uses a single template: ``tool_use``, if it can also render conversations without tools.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from agentrl.errors import TemplateError
from agentrl.render.trial import EndlessTemplate, render_in_time

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_log = logging.getLogger(__name__)
NAMES = ("tool_use", "default")
"""Names of usable templates in order of preference."""
_PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"})


def choose_chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a tokenizer's chat template; of several, the one that renders conversations with and without tools.

    Raises:
        TemplateError: the tokenizer has no template, or only templates with other names.
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
    rendered = {name: _render(tokenizer, template[name]) for name in NAMES if isinstance(template.get(name), str)}
    if not rendered:
        raise TemplateError(
            "the tokenizer has several chat templates, but none with a known name",
            got=f"templates named {', '.join(sorted(map(str, template)))}",
            expected=f"one named {' or '.join(NAMES)}",
            hint="set model.chat_template to the file of the template that the model was trained with",
        )
    chosen = next((name for name, text in rendered.items() if text is not None), next(iter(rendered)))
    differs = "default" in rendered and rendered["default"] != rendered[chosen]
    _log.info(
        "of the tokenizer's chat templates (%s), %s is used%s",
        ", ".join(sorted(map(str, template))),
        chosen,
        "; without tools, it shows conversations differently from default" if differs else "",
    )
    return str(template[chosen])


def _render(tokenizer: PreTrainedTokenizerFast, template: str) -> str | None:
    """Render a conversation without tools; return ``None`` if the template refuses it."""
    render = functools.partial(tokenizer.apply_chat_template, [*_PROBE], chat_template=template, tokenize=False)
    try:
        return str(render_in_time(render, ", ".join(message["role"] for message in _PROBE)))
    except EndlessTemplate:
        raise
    except Exception:
        return None
