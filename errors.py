"""The exception tree. Imports nothing, so that every layer can raise from it.

    PieceworkError
    ├── ConfigError (ValueError)        a phase config, a launch flag or a JSON key is not acceptable
    │   └── NotAvailableError           the value is valid, but this build or this device cannot do it
    ├── RegistrationError               a split op definition breaks a rule of the registry
    ├── ContextError                    an operator body needs the per-step context and there is none
    ├── InputError (ValueError)         the inputs of a call do not match what the runtime was told
    ├── TraceError                      the model cannot become one graph
    │   ├── DynamicDimError             a declared dynamic dim did not stay dynamic
    │   └── GuardError                  the trace holds only for sizes that no interval describes
    ├── RecompileError                  evaluate_guards: a call would have needed another trace
    ├── CompileError                    a compiler failed on a piece
    ├── ArtifactError                   a compiled piece on disk cannot be written, or not be used here
    │   └── NoArtifactError             a piece can be compiled, but only in the process that is to run it
    ├── WorkerLostError                 a compile worker crashed, hung or could not be started
    ├── CaptureError                    a forward cannot be captured, or a capture can no longer be replayed
    │   └── KernelNotReadyError         not yet: a kernel that it launches is still being compiled
    ├── PortableError                   a program cannot leave the process, or is not one that fits here
    ├── RuntimeClosedError              the runtime was closed
    └── ModelError                      a checkpoint, its config or its tokenizer cannot be used

Every message says where, what was expected, what was got and what to do.
"""

from __future__ import annotations


class PieceworkError(Exception):
    """Root of everything Piecework raises on purpose."""


class ConfigError(PieceworkError, ValueError):
    """A phase config, a launch flag or a JSON key is not acceptable."""


class NotAvailableError(ConfigError):
    """The value is valid, but this build or this device cannot do what it asks for."""


class RegistrationError(PieceworkError):
    """A split op definition breaks a rule of the registry."""


class ContextError(PieceworkError):
    """An operator body needs the per-step context and there is none, or one of another type."""


class InputError(PieceworkError, ValueError):
    """The inputs of a call do not match what the runtime was told about them."""


class TraceError(PieceworkError):
    """The model cannot be traced into one graph."""


class DynamicDimError(TraceError):
    """A dim declared dynamic did not stay a symbol."""


class GuardError(TraceError):
    """The trace is valid only for sizes that no interval describes."""


class RecompileError(PieceworkError):
    """Under `evaluate_guards`, a call would have needed another trace."""


class CompileError(PieceworkError):
    """A compiler failed on a piece."""


class ArtifactError(PieceworkError):
    """A compiled piece on disk cannot be written, is damaged, or is not of the piece that it is to be used for."""


class NoArtifactError(ArtifactError):
    """Nothing that could be saved is made of the piece: it has to be compiled in the process that is to run it."""


class WorkerLostError(PieceworkError):
    """A compile worker crashed, missed its deadline, could not be started, or was closed with a job in hand."""


class CaptureError(PieceworkError):
    """A forward does what no capture can record, or a split op breaks what its capture relies on."""

    def __init__(self, message: str, *, op: str | None = None, line: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        """Qualified name of the operator, where it is known."""
        self.line = line
        """`file:line` of the model, where it is known."""


class KernelNotReadyError(CaptureError):
    """A forward cannot be captured yet: a kernel that it launches is being compiled beside the steps. Worth a retry."""


class PortableError(PieceworkError):
    """A program cannot leave the process, is damaged, or does not fit the model that it is to be bound to."""


class RuntimeClosedError(PieceworkError):
    """The runtime was closed."""


class ModelError(PieceworkError):
    """A checkpoint, its config or its tokenizer cannot be used."""
