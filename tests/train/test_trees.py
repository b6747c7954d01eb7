"""Training on episodes of several traces: loss and gradients against a loop over single traces."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.columns import RouterRoutes
from spmdrl.config import BatchSettings, Config
from spmdrl.config.method import AlgorithmSettings
from spmdrl.credit import advantages_of, per_token, sequence_advantages
from spmdrl.data.prefix_tree import prefix_tree
from spmdrl.exchange import exchange_rollouts
from spmdrl.model.tensor_parts import like
from spmdrl.rollout.episode import FinishedEpisode, Trajectory
from spmdrl.rollout.packing import empty_rollouts, pack
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.tools.what_if.alternatives import Alternative
from spmdrl.tools.what_if.probe import probe
from spmdrl.train.coefficients import Coefficients
from spmdrl.train.microbatches import prepare
from spmdrl.train.objectives.objective_loss import loss_class, named_methods
from spmdrl.types import Advantages, Batch
from tests.helpers.built import changed
from tests.helpers.comparing import whole
from tests.helpers.meshes import world_under
from tests.helpers.policy_runs import config, small_model
from tests.helpers.trees import episodes
from tests.helpers.worlds import ON_CPU, in_world, make_trainer

TEMPERATURE = 0.8  # of policy_runs.config
MAX_TOKENS = 512  # sampling.max_response_tokens
KINDS = [["plain", "compacted", "turns", "retry"], ["compacted", "plain", "retry"]]
METHODS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "seq_mean_token_mean": {"aggregation": "seq_mean_token_mean"},
    "seq_mean_token_sum": {"aggregation": "seq_mean_token_sum"},
    "seq_mean_token_sum_norm": {"aggregation": "seq_mean_token_sum_norm"},
    "prompt_mean": {"aggregation": "prompt_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"},
    "rloo": {"advantage": "rloo", "correction": "none"},
    "opo": {"advantage": "opo", "loss_options": {"clip_low": 0.05, "clip_high": 0.3}},
    "gspo": {"loss": "gspo", "aggregation": "seq_mean_token_mean", "correction": "none"},
    "gspo, whole sequences corrected": {
        "loss": "gspo",
        "aggregation": "seq_mean_token_mean",
        "correction_options": {"level": "sequence", "upper": 1.5},
    },
    "truncated": {"mask_truncated": True, "aggregation": "seq_mean_token_mean"},
    "kl in the reward": {"kl_coef": 0.3, "kl": "k1", "kl_in": "reward"},
}
ALIKE = {name: METHODS[name] for name in ("token_mean", "prompt_mean", "opo")}
"""Of these nothing depends on the trace that a token is trained in."""


def old_of(rollout_logprobs: Tensor) -> Tensor:
    """Return made-up logprobs of the policy before the update."""
    return rollout_logprobs + 0.15 * torch.sin(37 * rollout_logprobs)


def ref_of(rollout_logprobs: Tensor) -> Tensor:
    """Return made-up logprobs of the reference."""
    return rollout_logprobs + 0.3 * torch.sin(11 * rollout_logprobs)


# --------------------------------------------------------------------------- by hand


def advantages_by_hand(
    samples: Sequence[FinishedEpisode], chosen: AlgorithmSettings
) -> list[float]:
    """Return the advantage of each episode."""
    rewards = [float(s.reward.value) for s in samples]
    if chosen.kl_coef:
        for at, s in enumerate(samples):
            for t in s.traces:
                own = t.rollout_logprobs[t.response_mask].double()
                rewards[at] -= chosen.kl_coef * float((old_of(own) - ref_of(own)).sum())
    found = []
    for own in samples:
        group = [at for at, s in enumerate(samples) if s.slot == own.slot]
        values = [rewards[at] for at in group]
        mean = sum(values) / len(values)
        reward = rewards[samples.index(own)]
        if chosen.advantage == "opo":
            sizes = [samples[at].num_sampled for at in group]
            mean = sum(n * v for n, v in zip(sizes, values)) / sum(sizes)
        scale = 1.0
        if chosen.advantage == "grpo":
            scale = 1 / (math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) + 1e-6)
        if chosen.advantage == "rloo":
            scale = len(values) / (len(values) - 1)
        found.append((reward - mean) * scale)
    return found


def weights_by_hand(samples: Sequence[FinishedEpisode], aggregation: str) -> list[float]:
    """Return the weight of a token of each episode."""
    sizes = [s.num_sampled for s in samples]
    if aggregation == "token_mean":
        return [1 / sum(sizes)] * len(samples)
    if aggregation == "seq_mean_token_mean":
        return [1 / n / len(samples) for n in sizes]
    if aggregation == "seq_mean_token_sum":
        return [1 / len(samples)] * len(samples)
    if aggregation == "seq_mean_token_sum_norm":
        return [1 / len(samples) / MAX_TOKENS] * len(samples)
    tokens = {s.slot: 0 for s in samples}
    for s in samples:
        tokens[s.slot] += s.num_sampled
    return [1 / tokens[s.slot] / len(tokens) for s in samples]


def allowed(trace: Trajectory, vocab: int) -> Tensor:
    """Return the ids that each token of a trace was drawn from: [T, vocab] bool."""
    drawn = torch.rand(len(trace.tokens), vocab, generator=torch.Generator().manual_seed(3))
    kept = drawn < 0.5
    kept[torch.arange(len(trace.tokens)), trace.tokens] = True
    kept[~trace.response_mask] = True
    return kept


def scores_by_hand(model: torch.nn.Module, trace: Trajectory) -> Tensor:
    """Return the logprobs of all tokens of a trace but the first, in nats."""
    logits = model(trace.tokens[None]).logits[0, :-1] / TEMPERATURE
    masks = SamplingMasks.of(trace.extra_columns)
    if masks is not None:
        logits = logits.masked_fill(~allowed(trace, masks.vocab)[1:], -torch.inf)
    return logits.log_softmax(-1).gather(1, trace.tokens[1:, None])[:, 0]


def losses_by_hand(
    model: torch.nn.Module, samples: Sequence[FinishedEpisode], chosen: AlgorithmSettings
) -> tuple[list[Tensor], float]:
    """Return the loss of each trace, and the sum of the sizes of their terms."""
    advantages = advantages_by_hand(samples, chosen)
    if chosen.mask_truncated:
        kept = [at for at, s in enumerate(samples) if not any(t.is_truncated for t in s.traces)]
        samples = [samples[at] for at in kept]
        advantages = [advantages[at] for at in kept]
    weights = weights_by_hand(samples, chosen.aggregation)
    losses = []
    size = 0.0
    for sample, advantage, weight in zip(samples, advantages, weights):
        for trace in sample.traces:
            scores = scores_by_hand(model, trace)
            mask = trace.response_mask[1:]
            mu = trace.rollout_logprobs[1:][mask]
            gap = scores[mask] - old_of(mu)
            low, high = 0.2, 0.2
            if chosen.loss == "gspo":
                gap = gap.mean().expand_as(gap)
                low, high = 3e-4, 4e-4
            low = chosen.loss_options.get("clip_low", low)
            high = chosen.loss_options.get("clip_high", high)
            ratio = gap.exp()
            terms = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            if chosen.correction == "tis":
                rho = old_of(mu) - mu
                if chosen.correction_options.get("level") == "sequence":
                    rho = rho.sum().expand_as(rho)
                terms = terms * rho.exp().clamp(max=chosen.correction_options.get("upper", 2.0))
            losses.append(weight * terms.sum())
            size += weight * float(terms.detach().abs().sum())
    return losses, size


def assert_as_by_hand(
    found: dict[tuple[str, ...], tuple[float, dict[str, Tensor]]],
    case: str,
    method: str,
    *,
    samples: Sequence[FinishedEpisode],
    folder: Path,
) -> None:
    """Compare loss and gradients of each layout, in float32, with those of a loop in float64.

    Gradients of traces cancel out. What is left is compared by the size of what was added: a loop
    over traces in float32 is up to 1.3e-6 of the rest away from one in float64 as well.
    """
    chosen = changed(_configs(folder, folder)[LAYOUTS[0]], algorithm=METHODS[method]).algorithm
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses, size = losses_by_hand(model, samples, chosen)
    parameters = dict(model.named_parameters())
    expected = {name: torch.zeros_like(own) for name, own in parameters.items()}
    sizes = dict.fromkeys(parameters, 0.0)
    for loss in losses:
        of_trace = torch.autograd.grad(loss, list(parameters.values()))
        for name, own in zip(parameters, of_trace):
            expected[name] += own
            sizes[name] += float(own.abs().max())
    total = float(sum(loss.detach() for loss in losses))
    for layout in LAYOUTS:
        own_loss, gradients = found[layout, case, method]
        assert abs(own_loss - total) <= 1e-6 * size, layout
        assert gradients.keys() == expected.keys()
        for name, own in expected.items():
            gap = float((gradients[name] - own).abs().max())
            assert gap <= 1e-6 * sizes[name], (layout, name)


# --------------------------------------------------------------------------- by the trainer


def exchanged(world: Any, samples: Sequence[FinishedEpisode], *, holders: int = 2) -> Batch:
    """Return the batch of episodes, of which each of the first ranks has some; with made-up
    columns."""
    own = [s for at, s in enumerate(samples) if at % holders == world.rank]
    rollouts = pack(own, sums={}, num_shown=0) if own else empty_rollouts()
    batch = exchange_rollouts(rollouts, world, step=0)
    columns = tuple(
        tuple(
            {
                "old_logprobs": old_of(one.rollout_logprobs),
                "ref_logprobs": ref_of(one.rollout_logprobs),
            }
            for one in update
        )
        for update in batch.updates
    )
    return replace(batch, columns=columns)


def trained(
    trainer: Any, batch: Batch, cfg: Config, *, credit: Advantages | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and whole gradients of a batch under a config's methods."""
    world, model = trainer.world, trainer.policy.model
    batch = replace(batch, kl_coef=cfg.algorithm.kl_coef)
    credit = credit or advantages_of(batch, cfg=cfg, world=world, step=0)
    loss = loss_class(cfg)(
        cfg,
        world,
        loss_fn=named_methods(cfg)["loss_fn"],
        coefficients=Coefficients(cfg),
        companions=trainer.companions,
    )
    teachers = trainer.companions.get("teacher")
    lessons = teachers.lessons if teachers else None
    updates = prepare(loss.with_columns(batch), credit, cfg=cfg, model=model, lessons=lessons)
    gradients, totals = trainer.policy.gradient(updates[0], loss.of_updates(updates, model, step=0))
    parameters = trainer.policy.optimizer.parameters
    full = whole({name: like(parameters[name], own) for name, own in gradients.items()})
    return totals.loss, full


def _losses(base: Any, cfgs: dict[str, Config], cases: Cases) -> dict[tuple[str, ...], Any]:
    """Return {(layout, case, method): loss, gradients} of one job."""
    found = {}
    for layout, cfg in cfgs.items():
        world = world_under(base, cfg)
        trainer = make_trainer(cfg, world)
        for case, (samples, methods) in cases.items():
            batch = exchanged(world, samples)
            if not world.is_trainer:
                continue
            rows = [one.row for one in trainer._prepare(batch)[0] if one.num_tokens]
            shares = any(row.own.row_length < len(row.tokens) for row in rows)
            assert shares == world.shares_prefixes and len(batch.updates[0]) > 1
            for name, options in methods.items():
                own = changed(cfg, algorithm=options)
                found[layout, case, name] = trained(trainer, batch, own)
            if case == "tree":
                found[layout, "probe"] = probe(trainer, batch, Alternative("", cfg, {}), step=0)
    return found


def _apart(
    base: Any, cfgs: dict[str, Config], trees: list[FinishedEpisode]
) -> dict[tuple[str, str], Any]:
    """Return {(layout, `trees` or `apart`): loss, gradients}. Apart, each trace is an episode, with
    the advantage of its tree."""
    apart = [
        replace(sample, sample=10 * sample.sample + number, traces=(trace,))
        for sample in trees
        for number, trace in enumerate(sample.traces)
    ]
    found = {}
    for layout, cfg in cfgs.items():
        world = world_under(base, cfg)
        trainer = make_trainer(cfg, world)
        batches = {"trees": exchanged(world, trees), "apart": exchanged(world, apart)}
        if not world.is_trainer:
            continue
        values = sequence_advantages(batches["trees"], cfg=cfg)
        for kind, batch in batches.items():
            credit = per_token(batch, values)
            found[layout, kind] = trained(trainer, batch, cfg, credit=credit)
    return found


def _planned(base: Any, cfg: Config) -> list[int]:
    """Return the computed tokens of each micro-batch of a group with a long prompt."""
    world = world_under(base, changed(cfg, batch={"tokens_per_microbatch": 1024}))
    samples = episodes([["compacted"] * 6], prompt_length=200)
    microbatches = exchanged(world, samples, holders=1).microbatches
    sizes = [(one.tokens, one.cu_seqlens.diff().tolist()) for one in microbatches]
    return [len(prefix_tree(tokens, lengths).sources) for tokens, lengths in sizes]


def _all(base: Any, cases: tuple, *apart: tuple) -> dict[tuple[str, ...], Any]:
    found = _losses(base, *cases)
    found["planned",] = _planned(base, cases[0]["alone, shared"])
    for own in apart:
        found |= _apart(base, *own)
    return found


LAYOUTS = ("alone, whole", "alone, shared", "two ranks, whole", "two ranks, shared")
Cases = dict[str, tuple[list[FinishedEpisode], dict[str, dict[str, Any]]]]
"""{name: episodes, methods}."""


def _configs(folder: Path, out: Path) -> dict[str, Config]:
    cfg = changed(config(folder, out), batch=BatchSettings(group_size=4, tokens_per_microbatch=96))
    alone = replace(ON_CPU, placement="split", world_size=2, trainer_ranks=1)
    both = replace(ON_CPU, world_size=2)
    return {
        f"{ranks}, {sharing}": changed(cfg, layout=layout, batch={"share_prefixes": share})
        for ranks, layout in (("alone", alone), ("two ranks", both))
        for sharing, share in (("whole", "never"), ("shared", "auto"))
    }


def _samples() -> list[FinishedEpisode]:
    found = episodes(KINDS)
    first, second, third = found[1].traces
    found[1] = replace(found[1], traces=(first, replace(second, is_truncated=True), third))
    return found


def _masked(sample: FinishedEpisode, *, vocab: int) -> FinishedEpisode:
    """Return an episode with the masks of its tokens."""
    traces = []
    for trace in sample.traces:
        masks = SamplingMasks.from_allowed(allowed(trace, vocab))
        traces.append(replace(trace, extra_columns={SamplingMasks.key: masks}))
    return replace(sample, traces=tuple(traces))


def _routed(sample: FinishedEpisode) -> FinishedEpisode:
    """Return an episode with the experts of its tokens, the same for the same token and place."""
    traces = []
    for trace in sample.traces:
        places = torch.arange(len(trace.tokens))
        first = (5 * trace.tokens + 3 * places)[:, None, None] + torch.tensor([[[0], [3]]])
        routes = (first + torch.tensor([0, 5])) % 8  # [T, 2 layers, 2 choices] of 8 experts
        routes[-1] = -1
        columns = {RouterRoutes.key: RouterRoutes(routes.to(torch.int8))}
        traces.append(replace(trace, extra_columns=columns))
    return replace(sample, traces=tuple(traces))


def _moved(sample: FinishedEpisode) -> FinishedEpisode:
    """Return a compacted episode whose first answer is trained in its second trace."""
    first, second, *others = sample.traces
    shared = torch.arange(20, 24)
    given = {
        name: getattr(second, name).index_copy(0, shared, getattr(first, name)[shared])
        for name in ("response_mask", "rollout_logprobs", "policy_versions")
    }
    taken = {
        name: getattr(first, name).index_copy(0, shared, getattr(second, name)[shared])
        for name in given
    }
    return replace(sample, traces=(replace(first, **taken), replace(second, **given), *others))


def _cases(folder: Path) -> Cases:
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    samples = _samples()
    return {
        "tree": (samples, METHODS),
        "masks": ([_masked(s, vocab=vocab) for s in samples], {"rloo": METHODS["rloo"]}),
        "reordered": ([replace(s, traces=s.traces[::-1]) for s in samples], ALIKE),
        "moved": ([_moved(s) if len(s.traces) == 3 else s for s in samples], ALIKE),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    where = tmp_path_factory.mktemp("trees")
    folder = small_model(where)
    cfgs = _configs(folder, where)
    mixture = small_model(where, "mixture", architecture="qwen3_moe", initializer_std=0.1)
    teacher = small_model(where, "teacher", seed=1)
    routed = {"model": {"path": str(mixture), "moe": {"replay": True}}}
    distilled = {
        "model": {"teacher": str(teacher)},
        "algorithm": {"objective": "on_policy_distill", "loss": "divergence"},
    }
    return folder, in_world(
        cfgs["two ranks, shared"],
        _all,
        (cfgs, _cases(folder)),
        (_alone("routed", cfgs, routed), [_routed(sample) for sample in _samples()]),
        (_alone("distilled", cfgs, distilled), _samples()),
    )


def _alone(name: str, cfgs: dict[str, Config], changes: dict[str, dict]) -> dict[str, Config]:
    """Return changed configs of one rank, with and without shared prefixes."""
    return {
        f"{name}, {sharing}": changed(cfgs[f"alone, {sharing}"], **changes)
        for sharing in ("whole", "shared")
    }


@pytest.mark.parametrize("case, method", [*(("tree", name) for name in METHODS), ("masks", "rloo")])
def test_loss_and_gradients_of_a_tree_are_those_of_its_traces_one_by_one(case, method, ran):
    folder, ranks = ran
    samples = _cases(folder)[case][0]
    assert_as_by_hand(ranks[0], case, method, samples=samples, folder=folder)


@pytest.mark.parametrize("case", ["reordered", "moved"])
@pytest.mark.parametrize("method", ALIKE)
def test_order_of_traces_and_place_of_a_shared_token_do_not_matter(case, method, ran):
    folder, ranks = ran
    assert_as_by_hand(ranks[0], case, method, samples=_samples(), folder=folder)


@pytest.mark.parametrize("what", ["routed", "distilled"])
def test_a_tree_trains_as_its_traces_apart_do(what, ran):
    _, ranks = ran
    expected_loss, expected = ranks[0][f"{what}, whole", "apart"]
    for layout in (f"{what}, whole", f"{what}, shared"):
        loss, gradients = ranks[0][layout, "trees"]
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, own in expected.items():
            # Both are in float32: each may be 1e-6 away.
            assert (gradients[name] - own).abs().max() <= 2e-6 * own.abs().max(), (layout, name)


def test_a_push_on_an_episode_is_that_on_all_tokens_of_its_traces(ran):
    _, ranks = ran
    counts = [len(sample.traces) for sample in _samples()]
    for layout in LAYOUTS[:2]:
        found = ranks[0][layout, "probe"]
        tokens = [sum(found.token_pushes[row]) for row in range(sum(counts))]
        each = torch.tensor(tokens, dtype=torch.float64).split(counts)
        torch.testing.assert_close(found.pushes, torch.stack([own.sum() for own in each]))
        assert found.pushes.all()


def test_what_traces_share_with_any_other_of_their_group_is_computed_once(ran):
    _, ranks = ran
    (computed,) = ranks[0]["planned",]
    # A prompt of 200 tokens, and of each of six episodes: the rest of its first trace, what its
    # second one has of its own, and the third.
    assert computed == 200 + 6 * ((4 + 18 + 6) + (2 + 3) + (2 + 9 + 2))
