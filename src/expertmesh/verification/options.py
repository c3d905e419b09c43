"""The options of `verify` on the command line, beside the configuration. Ranks get them as JSON.

This module never imports torch, so the command line can use it at once.
"""

import json
import shutil
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.io.directory import nearest

LAYERS = ("bytes", "forward", "backward", "update", "metamorphic", "artifacts")
DEFAULT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of one verification. Raises `InputError` for an unknown layer in `only`."""

    layers: int | None = None
    """The number of leading blocks of the model to verify; None: all."""
    tokens: int = DEFAULT_TOKENS
    """The approximate number of tokens of one step, over all ranks."""
    self_test: bool = False
    """Plant known bugs after the layers of the proof."""
    only: tuple[str, ...] = LAYERS
    """The layers of the proof to run."""
    random_data: bool = False
    """Draw random token ids, because no data is named."""
    report: str | None = None
    """The path of the JSON report. None: in `output_dir`, or none with `random_data`."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A part of the name of the scratch directory, that of no other verification."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.only if name not in LAYERS]
        if unknown:
            raise InputError(
                f"--only {unknown[0]}: is no layer of the proof; use some of {', '.join(LAYERS)}",
                key="verify.no-such-layer",
            )

    def scratch_beside(self, config: Config) -> Path:
        """Return where the scratch directory is made: in the nearest existing parent of `output_dir`; with random data,
        in the working directory.
        """
        return Path.cwd() if self.random_data else nearest(Path(config.output_dir).absolute().parent)

    @property
    def scratch_prefix(self) -> str:
        return f".expertmesh-verify-{self.token}-"

    def remove_scratch(self, config: Config) -> None:
        """Remove what ranks that were ended have left, in whichever parent existed when they made it."""
        places = [Path.cwd()] if self.random_data else Path(config.output_dir).absolute().parents
        for directory in (found for place in places for found in place.glob(f"{self.scratch_prefix}*")):
            shutil.rmtree(directory, ignore_errors=True)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "VerifyOptions":
        """Return the options that `dump` wrote; the defaults for an empty text."""
        values = json.loads(text or "{}")
        return cls(**{**values, "only": tuple(values.get("only", LAYERS))})
