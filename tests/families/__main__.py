"""`make families`: prove every family that the installed transformers has, and write docs/models.md.

`python -m tests.families [NAME ...]` proves only those named and writes nothing. Exit 1 when a proof does not hold.
"""

import sys
import time
import traceback
import warnings

import torch
import transformers

import expertmesh
from tests.families.catalogue import families
from tests.families.outcomes import outcome_of
from tests.families.table import PATH, Outcome, proof_cell, render


def _said_of(outcome: Outcome) -> str:
    parts = {"parity": outcome.proof or "", **outcome.axes}
    return ", ".join(f"{name} {proof_cell(part)}" for name, part in parts.items())


def main(names: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in expertmesh.__all__:
        getattr(expertmesh, name)  # they import lazily; here once, instead of in every forked rank
    outcomes = []
    for family in families():
        if names and family.name not in names:
            continue
        started = time.monotonic()
        try:
            outcome = outcome_of(family, with_bf16=True)
        except Exception as error:
            # Whatever it is, the other families are still worth knowing; the exit code and the table report it.
            traceback.print_exception(error)
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}" if str(error) else repr(error)
            outcome = Outcome(family.name, family.model_class, "failed", reason=reason)
        outcomes.append(outcome)
        detail = outcome.reason if outcome.proof is None else _said_of(outcome)
        print(f"{family.name:24} {outcome.kind:10} {time.monotonic() - started:5.1f} s  {detail}", flush=True)
    if not names:
        PATH.write_text(render(outcomes))
        print(f"wrote {PATH}")
    return int(any(outcome.kind == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
