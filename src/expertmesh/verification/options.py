"""What the command line says to `verify` beside the configuration; travels to the ranks as JSON. Needs no torch."""

import json
from dataclasses import asdict, dataclass

from expertmesh.config.errors import InputError

LAYERS = ("bytes", "forward", "backward", "update", "metamorphic", "artifacts")
DEFAULT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """`layers`: blocks of the model to keep (None: all). `tokens`: of one step over the whole job, about.

    `only`: which layers of the proof. `random_data`: no data is named, so token ids are drawn. `report`: where the JSON
    goes (None: nowhere).
    """

    layers: int | None = None
    tokens: int = DEFAULT_TOKENS
    self_test: bool = False
    only: tuple[str, ...] = LAYERS
    random_data: bool = False
    report: str | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.only if name not in LAYERS]
        if unknown:
            raise InputError(
                f"--only {unknown[0]}: is no layer of the proof; use some of {', '.join(LAYERS)}",
                key="verify.no-such-layer",
            )

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "VerifyOptions":
        """What `dump` wrote; the defaults for an empty text."""
        values = json.loads(text or "{}")
        return cls(**{**values, "only": tuple(values.get("only", LAYERS))})
