"""Make the objective that a configuration names.

Each objective of responses has a file here, on the mechanism that they share (pairs.py); distill has its own.
"""

from expertmesh.config import ObjectiveConfig
from expertmesh.step.objective import CrossEntropy, Distilling, EvaluatedCrossEntropy, Objective
from expertmesh.step.objectives.distill import Distill
from expertmesh.step.objectives.dpo import Dpo
from expertmesh.step.objectives.kto import Kto
from expertmesh.step.objectives.orpo import Orpo
from expertmesh.step.objectives.pairs import PairObjective
from expertmesh.step.objectives.simpo import Simpo

OF_PAIRS: dict[str, type[PairObjective]] = {"dpo": Dpo, "simpo": Simpo, "orpo": Orpo}


def objective_of(config: ObjectiveConfig, *, rows: int, target_tokens: int, evaluated: bool = False) -> Objective:
    """Return the objective of a step with that many rows and targets, or of an evaluation, with its figures."""
    if config.teacher is not None:
        options = Distilling(config.temperature, config.kl == "reverse", config.sft_weight)
        return Distill(count=target_tokens, options=options)
    if config.pairs:
        return OF_PAIRS[config.name](count=rows, **config.options)
    if config.judged:
        return Kto(count=rows, **config.options)
    return EvaluatedCrossEntropy(target_tokens) if evaluated else CrossEntropy(target_tokens)
