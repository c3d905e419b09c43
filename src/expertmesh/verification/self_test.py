"""Layer 7, `--self-test`: plant known bugs in the job, one at a time, and check that the right layer fails.

The reference is never changed. A bug that is impossible in the run (one rank, no moments) is reported as not planted.
"""

import gc
from dataclasses import replace
from pathlib import Path

from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError
from expertmesh.verification.bugs import bugs, zero_half_of_each_adapter
from expertmesh.verification.layers.artifacts import check_artifacts
from expertmesh.verification.proof import Hooks, Proof
from expertmesh.verification.result import Check, Mutation
from expertmesh.verification.setup import Setup, in_float32


def self_test(proof: Proof) -> list[Mutation]:
    """Plant every bug and return which checks caught it; the reference's results are reused.

    Collectives: every rank calls it; those of building jobs and of the checks.
    """
    config = proof.setup.config
    setup = replace(proof.setup, config=config.model_copy(update={"precision": in_float32(config.precision)}))
    sound = Proof(setup, proof.scratch, proof.expectations, uses_float64=False)
    found = []
    for bug in bugs(sound):
        if bug.refusal is not None:
            found.append(Mutation(bug.name, bug.expected, why_not=bug.refusal))
            continue
        broken = sound.planted(bug.hooks)
        checks = [(layer, check) for layer, run in bug.checks.items() for check in run(broken)]
        caught = tuple((layer, check.name) for layer, check in checks if check.status == "fail")
        found.append(Mutation(bug.name, bug.expected, caught))
        # Free the job with this bug before the next one is built.
        del broken, checks
        gc.collect()
    return [*found, _adapter_bug(setup, proof.scratch)]


def _adapter_bug(setup: Setup, scratch: Path) -> Mutation:
    """Plant zeros in half of each saved B, as if one rank's rows alone were saved (axolotl 3772).

    It runs on a job with adapters: those of the run, or small ones if the run has none.
    """
    name, expected, config = "half of each adapter's rows zeroed", "artifacts", setup.config
    # PEFT cannot read adapters on the experts of some families; then attention alone gets adapters.
    wanted = [LoraConfig(r=4, alpha=8.0, targets=targets) for targets in (("attention", "experts"), ("attention",))]
    checks: list[Check] = []
    for lora in [config.lora] if config.lora is not None else wanted:
        adapted = replace(setup, config=config.model_copy(update={"lora": lora}))
        broken = Proof(adapted, scratch, hooks=Hooks(saved=zero_half_of_each_adapter), uses_float64=False)
        try:
            checks = check_artifacts(broken, merges=False)
            break
        except InputError as error:
            why_not = str(error)
    if not checks:
        return Mutation(name, expected, why_not=why_not)
    if all(check.status == "not run" for check in checks):
        return Mutation(name, expected, why_not=checks[-1].note)
    return Mutation(name, expected, tuple((expected, check.name) for check in checks if check.status == "fail"))
