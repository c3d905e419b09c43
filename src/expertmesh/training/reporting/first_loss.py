"""Judge the weights by the first step's loss: printed beside ln(vocabulary), with a warning if it is too high.

A uniform guess scores ln(V). A checkpoint whose experts were lost or mixed up still trains, from a loss above that.
"""

import math
from collections.abc import Iterator
from typing import Any

from expertmesh.config import ObjectiveConfig

# transformers' own default for families that do not say how they are initialised.
_INITIALIZER_RANGE = 0.02
# What bf16 may make of the difference of two sums over long responses that are equal.
_ROUNDING_OF_PAIRS = 0.05
_DIFFERENT_TARGETS = 100


def first_loss_lines(config: Any, loss: float, target_tokens: int) -> Iterator[str]:
    """Return lines about `loss`, the mean over `target_tokens` tokens before the first update.

    `config` is the model's. Returns nothing for a loss that is not finite: the step reports that itself.
    """
    if not math.isfinite(loss):
        return
    text = config.get_text_config()
    vocabulary = int(text.vocab_size)
    uniform = math.log(vocabulary)
    yield f"first loss {loss:.3f} before any update; a uniform guess scores ln {vocabulary:,} = {uniform:.3f}"
    untrained = uniform + untrained_excess(text, target_tokens)
    if loss > untrained:
        yield (
            f"warning: step 1 loss {loss:.3f} is worse than a uniform guess (ln {vocabulary:,} = {uniform:.3f}), and "
            f"than an untrained model of this shape would be ({untrained:.3f}): the weights may not be what the config "
            "describes, or the data not what the tokenizer was made for"
        )


def first_loss_of_responses_lines(objective: ObjectiveConfig, loss: float) -> Iterator[str]:
    """Return the same for an objective of responses: before any update the model is its reference, if it has one, and
    every loss is known.
    """
    if not math.isfinite(loss):
        return
    if objective.at_reference is None:
        yield f"first loss {loss:.4f} before any update"
        return
    words, value = objective.at_reference
    yield f"first loss {loss:.4f} before any update; a model that equals its reference has {words} = {value:.4f}"
    if abs(loss - value) > _ROUNDING_OF_PAIRS:
        yield (
            f"warning: step 1 loss {loss:.4f} is not {words}: the reference is not the model that training starts "
            "from, or its log-probabilities are far from exact in precision.compute"
        )


def untrained_excess(text_config: Any, target_tokens: int) -> float:
    """Return how far above ln(V) the loss of freely initialised weights can lie.

    The last norm leaves hidden states of RMS 1, so logits are normal with σ = initializer_range · √hidden. Their mean
    loss is ln(V) + σ²/2; the mean over n targets spreads by σ/√n, of which three are allowed. A text repeats its
    tokens, whose logits hardly differ between positions, so that n is 100 at most (one by the sum of the squared shares
    of its tokens, 0.010 to 0.013 in English).
    """
    initializer = float(getattr(text_config, "initializer_range", None) or _INITIALIZER_RANGE)
    sigma = initializer * math.sqrt(int(text_config.hidden_size))
    return sigma**2 / 2 + 3 * sigma / math.sqrt(min(max(target_tokens, 1), _DIFFERENT_TARGETS))
