"""Evaluate during a run: figures over whole sets, and the model's answers to their first prompts.

Answers are greedy. Each token is a forward of all tokens before it, as in the evaluation of figures, without a cache of
keys and values: it is the same computation in every layout, pipeline stages included, and no second way through a model
has to be right. That suits a few short answers, not serving. Every rank calls all of it, and gets the same results.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from expertmesh.data import IGNORE, BatchLayout, EvaluationBatches, TokenizedDataset
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.terminal import tracked
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.loss import NextWords
from expertmesh.training.objective import by_row, evaluating, in_groups, table_of_rows
from expertmesh.training.reporting.metrics import EvalMetrics, EvalSample

if TYPE_CHECKING:
    from expertmesh.training.startup.prepare import Prepared

Ids = npt.NDArray[np.int64]


def evaluate(run: "Prepared") -> EvalMetrics:
    """Return the figures of all evaluation sets, with the answers that `eval.samples` asks for."""
    metrics = EvalMetrics.together({name: _figures(run, batches) for name, batches in run.evaluation.items()})
    return replace(metrics, samples=_samples(run)) if run.config.eval.samples else metrics


def _figures(run: "Prepared", batches: EvaluationBatches) -> EvalMetrics:
    """Compute the objective over a whole set. Collectives: those of `with_kl_of_step`, and one all-reduce."""
    chosen, model, mesh = run.checked.objective, run.model, run.mesh
    objective = chosen.of_step(rows=batches.rows, target_tokens=batches.target_tokens, evaluated=True)
    totals = torch.zeros(1 + len(objective.figures), dtype=torch.float64, device=mesh.device)
    mismatched = in_groups(batches.mismatched(), mesh, "") if chosen.config.judged else ()
    objective = chosen.with_kl_of_step(model, objective, mismatched, batches.desirable, mesh)
    with evaluating(model):
        for group in in_groups(batches, mesh, "evaluating"):
            compared, micro_batches = chosen.with_comparison(model, group, objective)
            for term in evaluate_terms(model, micro_batches, compared):
                totals += torch.cat([term.loss.double().view(1), term.figures_F])
    dist.all_reduce(totals)
    loss, *figures = totals.tolist()
    named = dict(zip(objective.figures, figures, strict=True))
    desirable = batches.desirable if chosen.config.judged else None
    return EvalMetrics(loss, batches.target_tokens, named, int(objective.count), objective.over, desirable)


def _samples(run: "Prepared") -> list[EvalSample]:
    # The first sample of each of the first rows; of preferences the chosen one.
    config = run.config
    found = [
        (name, dataset.position(index), *prompt_of(dataset, index))
        for name, dataset in run.data.evaluation.items()
        for index in range(len(dataset))[:: dataset.samples_per_row][: config.eval.samples]
    ]
    prompts = [prompt for *_, prompt, _ in found]
    most = [min(config.eval.sample_tokens, config.data.max_length - len(prompt)) for prompt in prompts]
    answers = generate(run.model, run.mesh, run.batch_layout, prompts, most, end_tokens(run.model))
    decode = partial(run.data.tokenizer.decode, clean_up_tokenization_spaces=False)
    return [
        EvalSample(name, source, *(str(decode(ids.tolist())) for ids in (prompt, answer, expected)))
        for (name, source, prompt, expected), answer in zip(found, answers, strict=True)
    ]


def prompt_of(dataset: TokenizedDataset, index: int) -> tuple[Ids, Ids]:
    """Return a sample's tokens before its last answer, and that answer: the last targets that follow each other.

    Where every token is a target, as in plain text, the first half is the prompt.
    """
    sample = dataset.sample(index)
    targets = np.flatnonzero(sample.labels != IGNORE)
    gaps = np.flatnonzero(np.diff(targets) > 1)
    start, end = int(targets[gaps[-1] + 1] if len(gaps) else targets[0]), int(targets[-1]) + 1
    if start <= 1:
        start = max(1, end // 2)
    return sample.input_ids[:start], sample.input_ids[start:end]


def end_tokens(model: nn.Module) -> set[int]:
    """Return the tokens that end an answer, by the generation config that is saved with the model."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set(named) if isinstance(named, list) else set() if named is None else {named}


def generate(
    model: nn.Module, mesh: Mesh, layout: BatchLayout, prompts: list[Ids], most: list[int], ends: set[int]
) -> list[Ids]:
    """Return up to `most` tokens for each prompt, each the one with the largest logit, up to the first of `ends`."""
    rows = list(prompts)
    unpacked = replace(layout, packing=False)
    for number in tracked(range(max(most, default=0)), max(most, default=0), "generating", "tokens"):
        # A row ends at `most` tokens, or at one of `ends` behind its prompt.
        ended = (len(row) > len(prompts[at]) and int(row[-1]) in ends for at, row in enumerate(rows))
        going = [at for at, ends_here in enumerate(ended) if number < most[at] and not ends_here]
        if not going:
            break
        # The token that follows a row is the only target of a sample that is one position longer.
        longer = [np.append(rows[at], layout.pad_token_id) for at in going]
        dataset = TokenizedDataset.of_samples(longer, [np.arange(len(row)) == len(row) - 1 for row in longer])
        groups = in_groups(EvaluationBatches(dataset, unpacked), mesh, "")
        words = table_of_rows(len(longer), mesh, ((group, by_row(model, group, NextWords())) for group in groups))
        for at, word in zip(going, words, strict=True):
            rows[at] = np.append(rows[at], int(word))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
