"""The errors a user can cause, each with the exit code the command line ends with.

Raised with one sentence that says what is wrong, where, why and how to mend it. The command line prints the
sentence alone; the Python interface raises the exception. Never used for broken invariants (asserts).
"""

from typing import ClassVar


class ExpertmeshError(Exception):
    """Base class; `exit_code` is what `expertmesh` ends with when the error reaches the command line."""

    exit_code: ClassVar[int] = 1


class InputError(ExpertmeshError):
    """Bad input: configuration, data, or a combination that is not supported."""

    exit_code: ClassVar[int] = 2


class IntegrityError(ExpertmeshError):
    """A weight, a checkpoint or a training value is not what it should be."""

    exit_code: ClassVar[int] = 3


class SecurityError(ExpertmeshError):
    """Refused because reading on would be unsafe: paths that leave the checkpoint, pickles."""

    exit_code: ClassVar[int] = 4


class DistributedFailure(ExpertmeshError):
    """A rank died, hung or never arrived."""

    exit_code: ClassVar[int] = 5
