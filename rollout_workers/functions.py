"""Rollout functions: the user's code that makes one sample out of as many turns as it likes.

    async def rollout(episode: Episode) -> float | Mapping[str, object] | None: ...

A rollout function is named `module:function`. It is called once for every sample of a group, the samples of a group
side by side on one engine. It drives the Episode it is given (rollout_workers.episode). Its return value is the
sample's reward; None leaves that to the reward function. A mapping has it as `reward`, and columns beside it. With
`rollout.resumable = True` it is called again with the turns of an interrupted attempt, otherwise interrupted samples
start anew. An object with an async `__call__` does as well; if it has `running()`, an async context manager, the worker
works within it.
"""

import contextlib
import importlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from buffer_wire.errors import InvalidField
from rollout_workers.counters import describe

if TYPE_CHECKING:
    from rollout_workers.episode import Episode
    from rollout_workers.options import WorkerOptions

RolloutFunction: TypeAlias = "Callable[[Episode], Awaitable[float | Mapping[str, object] | None]]"


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout function with its name and its abilities."""

    name: str
    function: RolloutFunction

    @property
    def resumable(self) -> bool:
        """True if the function goes on from the turns of an interrupted attempt."""
        return bool(getattr(self.function, "resumable", False))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold whatever the function needs while the worker works."""
        needs = getattr(self.function, "running", None)
        async with needs() if needs is not None else contextlib.nullcontext():
            yield


def load_rollout(name: str) -> Rollout:
    """Import `module:function`. Raises InvalidField."""
    function = load("rollout", name)
    if not is_coroutine(function):
        raise InvalidField("rollout", name, "a coroutine function: async def rollout(episode)")
    return Rollout(name, function)


def rollout_of(options: "WorkerOptions") -> Rollout | None:
    """Rollout that the options name: a function, an agent, a verifiers environment, or None for a single turn. Raises
    InvalidField.
    """
    if options.environment:
        return load_environment(options)
    if options.agent is not None:
        return Rollout(options.agent.function, _needing("agents", "agent", "agents.rollout").agent_of(options.agent))
    return load_rollout(options.rollout) if options.rollout else None


def load_environment(options: "WorkerOptions") -> Rollout:
    """An environment of another library, as `library:name`. Raises InvalidField."""
    library, _, name = options.environment.partition(":")
    if library != "verifiers":
        raise InvalidField("environment", options.environment, "verifiers:NAME")
    adapter = _needing(library, "environment", f"integrations.{library}")
    return Rollout(options.environment, adapter.load(name, options))


def _needing(extra: str, option: str, module: str) -> Any:  # noqa: ANN401 - a module
    """A module of the worker that needs an extra. Raises InvalidField."""
    try:
        return importlib.import_module(f"rollout_workers.{module}")
    except ImportError as error:
        limit = f"libraries that are installed: pip install 'rollout-buffer[{extra}]' ({describe(error)})"
        raise InvalidField(option, extra, limit) from error


def load(option: str, name: str) -> Callable[..., Any]:
    """Import what `module:name` names. Raises InvalidField, naming the option."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidField(option, name, f"module:function that can be imported ({describe(error)})") from error
    if not callable(found):
        raise InvalidField(option, name, f"a function; it is a {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def is_coroutine(function: Callable[..., Any]) -> bool:
    """True for coroutine functions, and for objects with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )
