"""The layers of a proof, in the order in which they run.

Every rank calls each of them with the same proof, in the same order, because their comparisons communicate.
"""

from collections.abc import Callable

from expertmesh.verification.layers.artifacts import check_artifacts
from expertmesh.verification.layers.metamorphic import check_metamorphic
from expertmesh.verification.layers.step import check_backward, check_bytes, check_forward
from expertmesh.verification.layers.update import check_update
from expertmesh.verification.proof import Proof
from expertmesh.verification.result import Check

CHECKS: dict[str, Callable[[Proof], list[Check]]] = {
    "bytes": check_bytes,
    "forward": check_forward,
    "backward": check_backward,
    "update": check_update,
    "metamorphic": check_metamorphic,
    "artifacts": check_artifacts,
}
