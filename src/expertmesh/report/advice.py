"""Find in a run's figures what asks for attention: one sentence for each, with what to do about it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from expertmesh.report.run import Run
from expertmesh.report.series import ignoring_nan

Column = npt.NDArray[np.floating[Any]]
# Shorter runs tell too little.
_ROWS = 20
# "First" and "last" are this share of the rows at either end.
_END = 10


def advice(run: Run) -> Iterator[str]:
    """Yield sentences for the page, the gravest first."""
    metrics = run.metrics
    if skipped := len(metrics.skipped):
        yield (
            f"{skipped:,} step{'s were' if skipped > 1 else ' was'} skipped for a value that was not finite: lower "
            "optim.learning_rate or lengthen the warm-up, and look at the data of these steps."
        )
    if len(metrics.step) < _ROWS:
        return
    loss, norm = metrics["loss"], metrics["grad_norm"]
    first, last = _ends(loss)
    if last > 1.05 * first:
        yield (
            f"The loss has grown from {first:.3g} to {last:.3g}: lower optim.learning_rate, and check that model "
            "and tokenizer belong together (expertmesh check)."
        )
    if np.nanmax(norm, initial=0) == 0:
        yield "The gradient norm was 0 in every step: nothing is trained; check lora.targets and data.loss_on."
    clip = run.config.optim.max_grad_norm if run.config is not None else None
    if clip is not None and (share := float(np.mean(norm[np.isfinite(norm)] > clip))) > 0.5:
        yield (
            f"{share:.0%} of the steps were clipped to optim.max_grad_norm {clip:g}, so their size is set by it "
            "rather than by the learning rate: raise it, or lower optim.learning_rate."
        )
    yield from _of_evaluation(run, loss)
    yield from _of_experts(run)
    faster, slower = _ends(metrics["tokens_per_second"])
    if slower < 0.7 * faster:
        yield (
            f"Tokens per second fell from {faster:,.0f} to {slower:,.0f}: look for other jobs on these machines, hot "
            "devices or slow storage; train --profile 3:5 shows where a step's time goes."
        )


def _of_evaluation(run: Run, loss: Column) -> Iterator[str]:
    evaluated = run.metrics.evaluated["loss"]
    best = float(np.nanmin(evaluated)) if np.isfinite(evaluated).any() else None
    if best is not None and evaluated[-1] > 1.02 * best:
        step = int(run.metrics.eval_step[int(np.nanargmin(evaluated))])
        first, last = _ends(loss)
        yield (
            f"The evaluation loss was lowest ({best:.4g}) at step {step:,} and is {evaluated[-1]:.4g} at the end"
            + (" while the training loss falls: the model learns the data by heart" if last < first else "")
            + "; take fewer epochs, or export the checkpoint nearest to that step."
        )


def _of_experts(run: Run) -> Iterator[str]:
    load_SL = run.metrics.load_SL
    if not run.metrics.layers or run.record is None or run.config is None or run.config.lora is not None:
        return  # adapters leave routers as they are
    rows, layers = max(1, len(run.metrics.step) // _END), run.record.moe_layers
    dead_L, load_L = (ignoring_nan(np.nanmedian, load_SL[key][-rows:], axis=0) for key in ("dead", "max_over_mean"))
    found = zip(run.moe_blocks, layers, load_L, dead_L, strict=False)
    if collapsed := [each for each in found if each[1].has_collapsed(*each[2:])]:
        _, layer, load, dead = max(collapsed, key=lambda each: each[3])
        yield (
            f"The router has collapsed in block {', '.join(str(block) for block, *_ in collapsed[:8])}: up to "
            f"{dead:.0f} of {layer.experts} experts are without a token, and the busiest has {load:.2g} times the mean "
            f"of at most {layer.most_load:.3g}; lower optim.learning_rate, raise moe.aux_loss_coef or "
            "moe.bias_update_rate, or set moe.router to frozen."
        )
    first, last = _ends(ignoring_nan(np.nanmax, load_SL["max_over_mean"], axis=1))
    if last > 1.5 * first and last > 3:
        most = max((layer.most_load for layer in layers), default=last)
        yield (
            f"The busiest expert's load grew from {first:.2g} to {last:.2g} of at most {most:.3g} times the mean: a "
            "step waits for its rank; raise moe.aux_loss_coef or moe.bias_update_rate, or set moe.router to frozen."
        )


def _ends(values: Column) -> tuple[float, float]:
    """Medians over the first and the last rows."""
    rows = max(1, len(values) // _END)
    return float(ignoring_nan(np.nanmedian, values[:rows])), float(ignoring_nan(np.nanmedian, values[-rows:]))
