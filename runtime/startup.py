"""When traces and compiles happen: strategies over the same entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigError
from ..phases import Startup

if TYPE_CHECKING:
    from .runtime import Runtime


class StartupPolicy(Protocol):
    """What a runtime does at the end of its constructor."""

    def on_construct(self, runtime: Runtime) -> None: ...


class Lazy:
    """Everything at its first appearance, inside the step that needs it."""

    def on_construct(self, runtime: Runtime) -> None:
        """Does nothing."""


class Eager:
    """Everything that the config lists, before the runtime is ready."""

    def on_construct(self, runtime: Runtime) -> None:
        """Warms up every bucket of both phases. Raises: ConfigError without example inputs to do it with."""
        if runtime.needs_inputs and not runtime.has_example_inputs:
            raise ConfigError(
                "startup: 'eager' traces and captures in the constructor, and needs to know the inputs; pass "
                "example_inputs={name: tensor, ...} (any values, any size), or use startup='lazy'"
            )
        runtime.warm_up()


POLICIES: dict[Startup, StartupPolicy] = {Startup.LAZY: Lazy(), Startup.EAGER: Eager()}
