"""Replay in GRPO's losses the experts that a rollout chose: `em.trainer(GRPOTrainer)(..., replay_routes=True)`.

The routes are those that the sharded model chose while it generated, or those that a `rollout_func` returns. They are
replayed wherever the policy computes log-probabilities of a rollout: the old ones, and those of each loss. The
reference chooses for itself. Methods of one trainer are wrapped, never a class.

    B rows; S positions, C of them of completions; L MoE layers, K top-k, V vocabulary
"""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import expertmesh as em
from expertmesh.compat import add_metric
from expertmesh.config.errors import InputError

WRAPPED = (
    "_generate_single_turn",
    "_generate",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Routes and log-probabilities of a rank's rollouts."""

    routes: list[torch.Tensor]
    """Routes of each row, int32 `[tokens of prompt and completion, L, K]` on the CPU, unpadded; -1 where unknown."""
    logprobs: Sequence[Sequence[float | None]] | None
    """Log-probabilities with which the tokens of each row's completion were sampled; None where unknown."""


class RouteReplay:
    """Wraps the methods of one GRPOTrainer that generate and that compute log-probabilities."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.routes: list[torch.Tensor] | None = None
        """Routes of the rows whose log-probabilities are computed now; None: the router chooses."""
        self.rollout: Rollout | None = None
        for name in WRAPPED:
            setattr(trainer, name, functools.partial(getattr(self, name), getattr(trainer, name)))

    def _generate_single_turn(self, own: Any, prompt_ids: Tokens, *args: Any, **kwargs: Any) -> Any:
        with _Recorder(self.trainer.model, self.trainer.temperature) as recorder:
            completion_ids, logprobs = own(prompt_ids, *args, **kwargs)
        self.rollout = recorder.rollout(prompt_ids, completion_ids)
        return completion_ids, logprobs

    def _generate(self, own: Any, prompts: Any) -> Any:
        found = own(prompts)
        if self.trainer.rollout_func is not None:
            prompt_ids, completion_ids, logprobs, extra_fields = found[0], found[1], found[4], found[5]
            # Not for the reward functions, which get the other fields.
            self.rollout = Rollout(_brought(extra_fields.pop("routes", None), prompt_ids, completion_ids), logprobs)
        assert self.rollout is not None
        self.routes = self.rollout.routes
        return found

    def _generate_and_score_completions(self, own: Any, inputs: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = own(inputs)
            # A list has a row's routes each, which TRL shuffles and splits as it does the tensors.
            found["routes"] = self.routes
            with torch.no_grad():
                self._log(found)
        finally:
            self.routes = None
        return found

    def _get_per_token_logps_and_entropies(
        self, own: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self.routes is not None and model is not self.trainer.ref_model:
            model = _Replayed(model, placed(self.routes, attention_mask, logits_to_keep))
        return own(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _compute_loss(self, own: Any, model: Any, inputs: dict[str, Any]) -> Any:
        self.routes = inputs["routes"]
        try:
            return own(model, inputs)
        finally:
            self.routes = None

    def _log(self, inputs: dict[str, Any]) -> None:
        """Report how the router would choose now, and what that makes of the log-probabilities.

        - `routes/changed_tokens`: share of tokens for which it would choose other experts in a layer or more.
        - `routes/changed_choices`: share of pairs of a token and a layer.
        - `routes/logp_difference_of_routing`: mean distance of the log-probabilities without and with the routes.
        - `routes/logp_difference_remainder`: mean distance of those with the routes and those of the rollout.

        Collectives: every rank calls it; those of one or two forwards for each chunk of rows, and one all-reduce.
        """
        trainer, mode = self.trainer, "train" if self.trainer.model.training else "eval"
        args, routes = trainer.args, self.routes
        assert self.rollout is not None
        assert routes is not None
        mask_BC = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        ids_BS = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask_BS, completion = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1), mask_BC.shape[1]
        chunk = args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size
        given = [key for key in _OF_IMAGES if key in inputs]
        run = functools.partial(
            trainer._get_per_token_logps_and_entropies,
            *(trainer.model, ids_BS, mask_BS, completion),
            batch_size=chunk,
            **{key: inputs[key] for key in given},
        )
        replayed_BC = inputs["old_per_token_logps"] if "old_per_token_logps" in inputs else run()[0]
        self.routes = None
        with em.record_routes(trainer.model) as recorded:
            free_BC = run()[0]
        fresh_BSLK = torch.cat(recorded).sort(-1).values
        route_BSLK = placed(routes, mask_BS, completion).to(fresh_BSLK.device).sort(-1).values
        known_BSL = (route_BSLK >= 0).all(-1) & mask_BS.bool()[..., None]
        changed_BSL = (fresh_BSLK != route_BSLK).any(-1) & known_BSL
        sampled_BC = _padded(self.rollout.logprobs, len(mask_BC), completion).to(free_BC)
        sampled_mask_BC = mask_BC.bool() & ~sampled_BC.isnan()
        counts = (
            (changed_BSL.any(-1), known_BSL.any(-1)),
            (changed_BSL, known_BSL),
            ((free_BC - replayed_BC).abs()[mask_BC.bool()], mask_BC),
            ((sampled_BC - replayed_BC).abs()[sampled_mask_BC], sampled_mask_BC),
        )
        sums = torch.stack([part.sum().to(torch.float64) for pair in counts for part in pair])
        totals = trainer.accelerator.reduce(sums, reduction="sum").view(-1, 2).tolist()
        for name, (total, count) in zip(_LOGGED, totals, strict=True):
            add_metric(trainer, mode, f"routes/{name}", total / count if count else float("nan"))


_LOGGED = ("changed_tokens", "changed_choices", "logp_difference_of_routing", "logp_difference_remainder")
_OF_IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


class _Replayed:
    """The policy as TRL's code calls it, one chunk of rows after the other, with their routes."""

    def __init__(self, model: Any, routes_BSLK: torch.Tensor) -> None:
        self.model, self.routes_BSLK = model, routes_BSLK

    def __call__(self, **inputs: Any) -> Any:
        rows = len(inputs["input_ids"])
        now, self.routes_BSLK = self.routes_BSLK[:rows], self.routes_BSLK[rows:]
        return self.model(**inputs, routes=now)


class _Recorder:
    """Records the routes of one `generate` of a model, and the log-probability of each token that it samples."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model, self.temperature = model, temperature
        self.stack, self.routes = ExitStack(), list[torch.Tensor]()
        self.last_BV: torch.Tensor | None = None
        """Log-probabilities of the next token, after the newest forward."""
        self.sampled = list[torch.Tensor]()
        """`[B]` of each token that has been an input since."""

    def __enter__(self) -> "_Recorder":
        self.routes = self.stack.enter_context(em.record_routes(self.model))
        before = self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.stack.callback(before.remove)
        self.stack.callback(self.model.register_forward_hook(self._after).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.last_BV is not None:
            self._note(kwargs["input_ids"][:, -1])

    def _after(self, model: Any, args: Any, output: Any) -> None:
        self.last_BV = (output.logits[:, -1].float() / self.temperature).log_softmax(-1)

    def _note(self, token_B: torch.Tensor) -> None:
        assert self.last_BV is not None
        self.sampled.append(self.last_BV.gather(1, token_B[:, None])[:, 0])

    def rollout(self, prompt_ids: Tokens, completion_ids: Tokens) -> Rollout:
        """Return what was recorded of each row, without its padding.

        A rank that has finished goes on until all have: what comes after the tokens of a row is not of it.
        """
        prompts, rows = self.routes[0].shape[1], len(prompt_ids)
        if any(part.shape[:2] != (rows, 1) for part in self.routes[1:]) or len(self.routes[0]) != rows:
            raise not_replayed(
                "a forward of generate has other rows, or more than one new position",
                "leave options out of args.generation_kwargs that change how tokens are searched",
            )
        self._note(torch.tensor([ids[-1] for ids in completion_ids], device=self.routes[0].device))
        routes_BSLK = torch.cat(self.routes, dim=1).cpu()
        logprobs = torch.stack(self.sampled, dim=1).tolist()
        lengths = [(len(prompt), len(ids)) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        return Rollout(
            [_lengthened(routes_BSLK[row, prompts - p : prompts + c], p + c) for row, (p, c) in enumerate(lengths)],
            [logprobs[row][:c] for row, (_, c) in enumerate(lengths)],
        )


def placed(routes: list[torch.Tensor], mask_BS: torch.Tensor, completion: int) -> torch.Tensor:
    """Return int32 `[B, S, L, K]` of rows whose prompts are padded on the left, and completions on the right.

    Args:
        mask_BS: The attention mask, which may hide a whole completion.
        completion: The number C of positions of completions.
    """
    length = mask_BS.shape[1]
    rows = []
    for row, tokens in zip(routes, mask_BS[:, : length - completion].sum(1).tolist(), strict=True):
        left = length - completion - tokens
        rows.append(F.pad(row, (0, 0, 0, 0, left, length - left - len(row)), value=-1))
    return torch.stack(rows)


def _brought(routes: Any, prompt_ids: Tokens, completion_ids: Tokens) -> list[torch.Tensor]:
    """Return the routes that a rollout function has returned.

    Raises:
        InputError: On all ranks, if those of one rank do not fit its tokens.

    Collectives: every rank calls it; one all-gather of a sentence on the default group.
    """
    lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
    rows, problem = list[torch.Tensor](), "returned no routes" if routes is None else None
    try:
        rows = [torch.as_tensor(row) for row in (() if routes is None else routes)]
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"returned routes that are no tensors ({error})"
    if problem is None and len(rows) != len(lengths):
        problem = f"returned routes of {len(rows)} rows for {len(lengths)} completions"
    for number, (row, length) in enumerate(zip(rows, lengths, strict=False)):
        # An engine does not run the last token, with which it ends.
        if row.dim() != 3 or len(row) not in (length - 1, length) or row.dtype == torch.bool or row.is_floating_point():
            problem = f"returned routes {tuple(row.shape)} {row.dtype} for row {number} of {length} tokens"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if problem := next((each for each in problems if each is not None), None):
        form = "integers [tokens of prompt and completion, MoE layers, top-k], -1 where there are none"
        raise not_replayed(f"rollout_func {problem}", f"give for each completion {form}")
    return [_lengthened(row.to("cpu", torch.int32), length) for row, length in zip(rows, lengths, strict=True)]


def not_replayed(why: str, mend: str) -> InputError:
    return InputError(f"replay_routes is True, but {why}; {mend}", key="trainer.routes")


def _lengthened(routes: torch.Tensor, length: int) -> torch.Tensor:
    """Return routes of `length` tokens, of which the last has none if it was never an input."""
    return F.pad(routes, (0, 0, 0, 0, 0, length - len(routes)), value=-1)


def _padded(logprobs: Sequence[Sequence[float | None]] | None, rows: int, length: int) -> torch.Tensor:
    if logprobs is None:
        return torch.full((rows, length), float("nan"))
    known = [[float("nan") if value is None else value for value in row] for row in logprobs]
    return torch.tensor([row + [float("nan")] * (length - len(row)) for row in known])
