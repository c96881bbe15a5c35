"""The contract of a tool: a typed function with a docstring that the policy may call.

    @agentrl.tool
    def midpoint(low: int, high: int) -> int:
        \"\"\"The middle of a range.

Args:
            low: Smallest candidate.
            high: Largest candidate.
        \"\"\"
        return (low + high) // 2

The JSON schema comes from the signature and the docstring (`transformers.utils.get_json_schema`). A stateful tool is a
class with ``__call__``; one object is made per episode, and ``async with`` opens and closes it when it defines that.
What the policy can mend is a `ToolError`, whose text the policy reads; a tool that raises anything else has failed
itself, and the policy reads a short notice while the error is counted.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar, overload

from agentrl.errors import ToolError, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

F = TypeVar("F", bound=Callable[..., Any])


class Tool:
    """A tool as the runtime sees it. Made by `tool`; still callable like the function it wraps.

    Args:
        target: The function, or the class of a stateful tool.
        name: Name that the policy uses; the function's own by default.
        stop: A call ends the episode (`Outcome.STOPPED_BY_TOOL`).
        inline: A synchronous function runs in the event loop instead of a thread; only for code that takes well
            under a millisecond.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        *,
        name: str | None = None,
        stop: bool = False,
        inline: bool = False,
    ) -> None:
        self.target = target
        self.stop = stop
        self.inline = inline
        self.name = name or _snake_case(target.__name__)
        functools.update_wrapper(self, target, updated=())
        if not inspect.getdoc(self._function):
            raise UsageError(
                f"tool {self.name} has no docstring",
                expected="one sentence, then an Args: section with a line per argument",
                hint="the policy reads it to learn what the tool does",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped function, as if it were not a tool."""
        return self.target(*args, **kwargs)

    @property
    def is_stateful(self) -> bool:
        """Whether each episode gets its own object."""
        return inspect.isclass(self.target)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        """What the policy sees described: the function, or the class's ``__call__`` without ``self``."""
        if not inspect.isclass(self.target):
            return self.target
        method = inspect.getattr_static(self.target, "__call__", None)
        if not inspect.isfunction(method):
            raise UsageError(f"tool {self.name} is a class that cannot be called", expected="a __call__ method")
        return types.MethodType(method, self)

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI-style services describe it."""
        from transformers.utils import get_json_schema  # slow to import, and only needed once a tool is used

        try:
            described = dict(get_json_schema(self._function))
        except Exception as error:
            raise UsageError(
                f"tool {self.name} cannot be described to a policy",
                got=error,
                expected="type hints on all arguments and an Args: section that names each",
            ) from error
        described["function"] = {**described["function"], "name": self.name}
        return described

    @functools.cached_property
    def _arguments(self) -> type[BaseModel]:
        from pydantic import ConfigDict, create_model

        hints = inspect.get_annotations(self._function, eval_str=True)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(self._function).parameters.values():
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), default)
        return create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, coerced to their declared types.

        Raises:
            ToolError: names each wrong argument, for the policy.
        """
        from pydantic import ValidationError

        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            names = ", ".join(self._arguments.model_fields) or "no arguments"
            raise ToolError(f"wrong arguments for {self.name} ({problems})", expected=names) from error
        return {name: getattr(checked, name) for name in type(checked).model_fields}

    async def open(self, stack: AsyncExitStack) -> Callable[..., Any]:
        """What an episode calls: the function, or this episode's own object, entered on `stack`."""
        if not self.is_stateful:
            return self.target
        made = self.target()
        if isinstance(made, AbstractAsyncContextManager):
            await stack.enter_async_context(made)
        bound: Callable[..., Any] = made
        return bound

    async def call(self, bound: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Validate the arguments, call, and give the result as text for the policy.

        Raises:
            ToolError: wrong arguments, or the tool says so.
        """
        checked = self.validate(arguments)
        if inspect.iscoroutinefunction(self._function):
            result = await bound(**checked)
        elif self.inline:
            result = bound(**checked)
        else:
            result = await asyncio.to_thread(functools.partial(bound, **checked))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


@overload
def tool(target: F, /) -> Tool: ...
@overload
def tool(*, name: str | None = None, stop: bool = False, inline: bool = False) -> Callable[[F], Tool]: ...
def tool(
    target: F | None = None, /, *, name: str | None = None, stop: bool = False, inline: bool = False
) -> Tool | Callable[[F], Tool]:
    """Make a tool of a typed function (or of a class with ``__call__``) that has a docstring.

    Raises:
        UsageError: no docstring.
    """

    def wrap(function: F) -> Tool:
        return Tool(function, name=name, stop=stop, inline=inline)

    return wrap if target is None else wrap(target)


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
