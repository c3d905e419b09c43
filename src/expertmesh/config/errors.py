"""The errors a user can cause, each with a stable key and the exit code the command line ends with.

Raised with one sentence that says what is wrong, where, why and how to mend it, and a `key` that names the cause for
programs: sentences may be reworded, keys may not. The command line prints the sentence alone (`--error-format json`
adds the key); the Python interface raises the exception. Never used for broken invariants (asserts).

How a key is named: `subject.cause` in lower-case words with hyphens, as in `layout.ep-divides-experts` or
`config.unknown-key`. The subject is what the user has to change (config, cli, launch, layout, model, data, checkpoint,
adapter ...), not the module that raises; the cause is the rule that was broken. One rule has one key, wherever it is
checked, and one file that raises it: the room that owns the rule has a function that others call. A kind of failure (a
file is absent, damaged, cannot be written) is raised where it happens. A key is a literal at its `raise`, never built
from values, and keeps its meaning once released.
"""

from typing import ClassVar


class ExpertmeshError(Exception):
    """Base class; `exit_code` is what `expertmesh` ends with when the error reaches the command line.

    `key` names the cause; a class has one for raise sites that say nothing more exact.
    """

    exit_code: ClassVar[int] = 1
    key: str = "error"
    on_all_ranks: bool = False
    """True if every rank of the job raises it, so that one can tell it for all."""

    def __init__(self, message: str = "", *, key: str | None = None) -> None:
        super().__init__(message)
        if key is not None:
            self.key = key


class InputError(ExpertmeshError):
    """Bad input: configuration, data, or a combination that is not supported."""

    exit_code: ClassVar[int] = 2
    key = "input"


class MissingHereError(InputError):
    """Something that this machine lacks; the same configuration may be right on another."""


class IntegrityError(ExpertmeshError):
    """A weight, a checkpoint or a training value is not what it should be."""

    exit_code: ClassVar[int] = 3
    key = "integrity"


class SecurityError(ExpertmeshError):
    """Refused because reading on would be unsafe: paths that leave the checkpoint, pickles."""

    exit_code: ClassVar[int] = 4
    key = "security"


class DistributedFailure(ExpertmeshError):
    """A rank died, hung or never joined."""

    exit_code: ClassVar[int] = 5
    key = "distributed"
