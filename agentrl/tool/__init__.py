"""Contract of a tool: a typed function with a docstring that the policy may call.

```python
@agentrl.tool
def midpoint(low: Annotated[int, "Smallest candidate."], high: Annotated[int, "Largest candidate."]) -> int:
    \"\"\"The middle of a range.\"\"\"
    return (low + high) // 2
```

The JSON schema comes from the signature and the docstring, in Google's, NumPy's or Sphinx's style. A stateful tool is a
class with ``__call__``; one object is created per episode, and opened and closed as an asynchronous context manager if
it is one. The arguments of its constructor are options in a config. Parameters with the type `ToolContext` or
`agentrl.sandbox.Sandbox` are filled in by the runtime, and hidden from the policy.

A `ToolError` is an error that the policy can fix; its message is shown to the policy. For any other exception, the
policy gets a short notice, and the error is counted. Infrastructure errors propagate. An exception of a tool ends only
its call, not the program, the event loop or the episode's task.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack, overload

from agentrl.errors import (
    A_REWARD,
    ConfigError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    bounded_reward,
    did_you_mean,
    shorten,
)
from agentrl.message import Content
from agentrl.tool.results import as_content, as_json, content_text, result_of, returns_awaitable
from agentrl.tool.schema import Arguments, WrongArguments, documentation, inner_function

__all__ = [
    "TOOL_NAME",
    "ForwardedTool",
    "Tool",
    "ToolContext",
    "ToolDependencies",
    "ToolResult",
    "ToolRules",
    "Toolset",
    "tool",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_WHOLE = ("max_tokens", "max_concurrent")
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Pattern of names that OpenAI-style services accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRules:
    """Rules for the calls of a tool."""

    stop: bool = False
    """True if a call ends the episode (`Outcome.STOPPED_BY_TOOL`)."""
    inline: bool = False
    """True if a synchronous function runs in the event loop instead of a thread; only for code that takes well under a
    millisecond."""
    parallel: bool = False
    """True if a call may run concurrently with other calls of the same answer; otherwise calls run one by one."""
    pure: bool = False
    """True if the result depends only on the arguments: results are cached, and calls are parallel."""
    timeout_s: float | None = None
    """Timeout of a call in seconds; ``agent.tool_timeout_s`` by default."""
    max_tokens: int | None = None
    """Maximum length of a result, if below ``agent.max_observation_tokens``; longer ones lose their middle."""
    max_concurrent: int | None = None
    """Maximum number of concurrent calls, over all episodes of the run."""
    max_per_second: float | None = None
    """Maximum number of calls that start per second, over all episodes."""

    def __post_init__(self) -> None:
        for name in ("stop", "inline", "parallel", "pure"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"a tool's {name} is not valid", got=repr(getattr(self, name)), expected="a bool")
        if self.stop and (self.parallel or self.pure):
            raise UsageError("a tool that ends the episode cannot be parallel or pure", got="stop=True")
        for name in ("timeout_s", "max_tokens", "max_concurrent", "max_per_second"):
            value, kinds = getattr(self, name), (int,) if name in _WHOLE else (int, float)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                expected = "a whole number" if name in _WHOLE else "a number"
                raise UsageError(f"a tool's {name} is not valid", got=repr(value), expected=expected)
            if value is not None and not value > 0:
                raise UsageError(f"a tool's {name} is too small", got=value, expected="more than 0")

    @property
    def is_parallel(self) -> bool:
        """True if calls may overlap."""
        return self.parallel or self.pure

    def non_defaults(self) -> dict[str, Any]:
        """Return the rules with other values than the default, by name."""
        values = {rule.name: (getattr(self, rule.name), rule.default) for rule in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


class ToolOptions(TypedDict, total=False):
    """`ToolRules` as keywords of `tool`."""

    stop: bool
    inline: bool
    parallel: bool
    pure: bool
    timeout_s: float | None
    max_tokens: int | None
    max_concurrent: int | None
    max_per_second: float | None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool that is more than a plain value: ``ToolResult("3 rows", reward=0.1, metrics={"rows": 3})``."""

    value: Any
    """Value for the policy: text, images, or a value that is converted to JSON (see `agentrl.tool.results`)."""
    _: dataclasses.KW_ONLY
    reward: float = 0.0
    """Reward, which is added to the calling turn, and to the reward component ``tool/NAME``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics, which are added to the trajectory's as ``tool/NAME/METRIC``."""
    stop: bool = False
    """True if the call ends the episode, independent of the tool's rules."""
    truncated: bool = False
    """True if the environment's step limit ends the episode with this call."""
    success: bool | None = None
    """For tools of an environment: True if the task is solved; by default, the environment's threshold decides."""

    @property
    def text(self) -> str:
        """Text of the value for text-only policies; lone surrogates are replaced."""
        return content_text(self.content)

    @property
    def content(self) -> Content:
        """Value for vision policies: parts if it contains an image, else its text."""
        return as_content(self.value)

    def normalize(self, tool: str) -> ToolResult:
        """Return this result with images as parts or with a JSON value, and with numbers as floats.

        Raises:
            EnvironmentFailure: a number is not finite.
        """
        checked: dict[str, float] = {}
        for name, value in {"reward": self.reward, **self.metrics}.items():
            number = None if isinstance(value, bool) else bounded_reward(value)
            if number is None:
                raise EnvironmentFailure(f"{name} of tool {tool} is {shorten(value)}", expected=A_REWARD)
            checked[name] = number
        reward = checked.pop("reward")
        content = self.content
        plain = as_json(self.value) if isinstance(content, str) else content
        return dataclasses.replace(self, value=plain, reward=reward, metrics=checked)


class ToolContext(ABC):
    """Interface of the calling episode for a tool; the runtime fills in parameters with this type."""

    provided_as: ClassVar[str] = "context"
    task_id: str
    seed: int
    """Seed of the episode's task."""
    timeout_s: float

    @abstractmethod
    async def act(self, action: str) -> str:
        """Take an action in the environment for the policy; return the observation."""

    @abstractmethod
    async def shared(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Return an object that the tools of one episode share, created at the first call and closed at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDependencies:
    """Values that the runtime fills in, by the ``provided_as`` of the parameter's type."""

    context: ToolContext | None = None
    sandbox: Any = None


class Tool:
    """A tool for the runtime, created by `tool`; callable like the function that it wraps."""

    def __init__(self, target: Callable[..., Any], *, name: str | None = None, **declared: Unpack[ToolOptions]) -> None:
        if not callable(target):
            raise UsageError("not a valid tool", got=repr(target), expected="a function, or a class with __call__")
        self.target = target
        self.name = _name_of(target) if name is None else name
        if not TOOL_NAME.fullmatch(self.name):
            hint = "set another one: agentrl.tool(name=…)"
            raise UsageError(
                "a tool's name is not valid",
                got=repr(self.name),
                expected="1 to 64 letters, digits, _ and -",
                hint=hint,
            )
        self.rules = ToolRules(**_known_rules(self.name, declared))
        self.options: Mapping[str, Any] = {}
        functools.update_wrapper(self, target, updated=())
        if not (text := documentation(self._function)):
            raise UsageError(
                f"tool {self.name} has no docstring",
                expected="one sentence, then an Args: section with a line per argument",
                hint="the policy reads it as the tool's description",
            )
        if not inspect.isclass(target):
            self.__doc__ = text
        inner = inner_function(self._function)
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise UsageError(
                f"tool {self.name} is a generator",
                got="yield",
                expected="a function that returns the whole result",
            )
        self._arguments = Arguments(f"tool {self.name}", self._function)
        if self.rules.pure and self.is_stateful:
            raise UsageError(f"tool {self.name} is stateful and cannot be pure", expected="a function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped function directly."""
        return self.target(*args, **kwargs)

    open_deadline_s: ClassVar[float | None] = None
    """Timeout of `open` in seconds (an infrastructure failure); ``None`` if opening is part of the first call."""

    @property
    def is_stateful(self) -> bool:
        """True if each episode has its own object."""
        return inspect.isclass(self.target)

    @property
    def stop(self) -> bool:
        """True if a call ends the episode."""
        return self.rules.stop

    @property
    def dependencies(self) -> frozenset[str]:
        """Names of the values that the runtime must fill in: fields of `ToolDependencies`."""
        parts = [part for part in (self._arguments, self._options) if part]
        return frozenset(what for part in parts for what in part.provided_parameters.values())

    @property
    def needs_sandbox(self) -> bool:
        """True if a parameter is the episode's sandbox."""
        return "sandbox" in self.dependencies

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        """Function of the tool: the target, or the class's ``__call__`` without ``self``."""
        if not inspect.isclass(self.target):
            return self.target
        method = inspect.getattr_static(self.target, "__call__", None)
        if not inspect.isfunction(method):
            raise UsageError(f"tool {self.name} is a class that cannot be called", expected="a __call__ method")
        return types.MethodType(method, self)

    @functools.cached_property
    def _runs_in_loop(self) -> bool:
        """True if the function is called in the event loop: it is inline, async, or returns an awaitable."""
        return self.rules.inline or returns_awaitable(self._function, self._arguments.result)

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of the tool for chat templates and OpenAI-style services."""
        return self._arguments.schema(self.name)

    @functools.cached_property
    def _options(self) -> Arguments | None:
        """Arguments of a stateful tool's constructor."""
        constructor = inspect.getattr_static(self.target, "__init__", None) if self.is_stateful else None
        if not inspect.isfunction(constructor):
            return None
        return Arguments(f"tool {self.name}", types.MethodType(constructor, self))

    def with_options(self, options: Mapping[str, Any]) -> Tool:
        """Return the tool with additional arguments for its constructor, which may validate them.

        Raises:
            ConfigError: the tool does not accept the arguments, or requires others.
        """
        if self._options is None and options:
            raise ConfigError(f"tool {self.name} has no options", got=", ".join(options), expected="only its name")
        try:
            checked = {} if self._options is None else self._options.read({**self.options, **options})
        except WrongArguments as error:
            expected = "no options" if self._options is None else self._options.describe()
            raise ConfigError(f"options of tool {self.name} do not fit: {error}", expected=expected) from error
        if options and self._options is not None and not self._options.provided_parameters:
            self.target(**checked)
        made = copy.copy(self)
        made.options = checked
        return made

    def with_rules(self, changes: Mapping[str, Any]) -> Tool:
        """Return the tool with some rules replaced."""
        for name, value in changes.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(f"{name} of tool {self.name} is not a number", got=repr(value))
        made = copy.copy(self)
        made.rules = dataclasses.replace(self.rules, **changes)
        return made

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in their declared types.

        Raises:
            ToolError: wrong arguments; the message names each of them for the policy.
        """
        try:
            return self._arguments.read(arguments)
        except WrongArguments as error:
            expected = self._arguments.describe()
            raise ToolError(f"wrong arguments for {self.name}: {error}; it takes: {expected}") from error

    async def open(self, stack: AsyncExitStack, provisions: ToolDependencies | None = None) -> Callable[..., Any]:
        """Return the callable of an episode: the function, or the episode's object, entered on `stack`."""
        provisions = provisions or ToolDependencies()
        called = self._provide(self._arguments, provisions)
        if not self.is_stateful:
            return functools.partial(self.target, **called) if called else self.target
        made = self.target(**self.options, **(self._provide(self._options, provisions) if self._options else {}))
        if isinstance(made, AbstractAsyncContextManager):
            await stack.enter_async_context(made)
        return functools.partial(made, **called) if called else made

    def _provide(self, arguments: Arguments, provisions: ToolDependencies) -> dict[str, Any]:
        provided = {name: getattr(provisions, what) for name, what in arguments.provided_parameters.items()}
        for name, what in arguments.provided_parameters.items():
            if provided[name] is None:
                hint = "set agent.sandbox={type: local}" if what == "sandbox" else "call it in an episode"
                raise UsageError(f"tool {self.name} needs a {what}, which is missing", hint=hint)
        return provided

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Call the result of `open` with arguments from `validate`.

        Raises:
            ToolError: raised by the tool.
            EnvironmentFailure: the reward or a metric is not a finite number.
        """
        call = functools.partial(bound, **checked)
        value = await result_of(call, f"tool {self.name}", in_loop=self._runs_in_loop)
        return (value if isinstance(value, ToolResult) else ToolResult(value)).normalize(self.name)

    async def call(self, bound: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Validate the arguments, call the tool, and return the result as text for the policy; raises as `run`."""
        return (await self.run(bound, self.validate(arguments))).text


class ForwardedTool(Tool):
    """Tool without a local function: a server, another process or another role executes its calls.

    Subclasses implement `validate`, and `open` with `run` or an episode that executes the calls.
    """

    def __init__(self, name: str, schema: dict[str, Any], rules: ToolRules) -> None:
        self.name, self.schema, self.rules, self.options = name, schema, rules, {}

    @property
    def is_stateful(self) -> bool:
        """False, because the state is where the calls are executed."""
        return False

    @property
    def dependencies(self) -> frozenset[str]:
        """None, because the resources are where the calls are executed."""
        return frozenset()


class Toolset(ABC):
    """Set of tools that are known only at run time, such as those of an MCP server.

    One object serves the whole run; the arguments of the constructor are options in a config.
    """

    @abstractmethod
    async def tools(self) -> Sequence[Tool]:
        """Return the tools, the same ones each time."""

    @abstractmethod
    async def close(self) -> None:
        """Release all resources; idempotent. No episode may be running."""


@overload
def tool(target: F, /) -> Tool: ...
@overload
def tool(*, name: str | None = None, **declared: Unpack[ToolOptions]) -> Callable[[F], Tool]: ...
def tool(
    target: F | None = None, /, *, name: str | None = None, **declared: Unpack[ToolOptions]
) -> Tool | Callable[[F], Tool]:
    """Create a tool from a typed function (or a class with ``__call__``) with a docstring.

    Args:
        target: The function or class.
        name: Name for the policy; default: the function's name.
        declared: Rules for calls: the fields of `ToolRules`.

    Raises:
        UsageError: the docstring is missing, or the rules contradict each other.
    """

    def wrap(function: F) -> Tool:
        return Tool(function, name=name, **declared)

    return wrap if target is None else wrap(target)


def _known_rules(tool: str, declared: ToolOptions) -> ToolOptions:
    known = [rule.name for rule in dataclasses.fields(ToolRules)]
    for name in declared:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(f"tool {tool} has an unknown rule", got=name, expected=", ".join(known), hint=hint)
    return declared


def _name_of(target: Any) -> str:
    while isinstance(target, functools.partial):
        target = target.func
    name = getattr(target, "__name__", type(target).__name__)
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
