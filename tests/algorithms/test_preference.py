"""Preference and reward-model losses against plain loops: value, gradient, masks, stats."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import registry
from spmdrl.algorithms.bradley_terry import bradley_terry
from spmdrl.algorithms.masked import log1mexp
from spmdrl.algorithms.preference.shared import pairs_in_loss
from spmdrl.algorithms.preference.unpaired import kto_kl, mismatched
from tests.helpers.built import examples
from tests.helpers.ragged import assert_loop, assert_nothing_is_read

Pairs = dict[str, torch.Tensor]
LN2 = 0.6931471805599453
CASES = [
    ("dpo", {}),
    ("dpo", dict(beta=0.3, label_smoothing=0.1)),
    ("dpo", dict(variant="robust", label_smoothing=0.2)),
    ("dpo", dict(variant="hinge")),
    ("dpo", dict(variant="ipo", beta=0.4)),
    ("dpo", dict(variant="norm", beta=2.0)),
    ("dpo", dict(variant="norm", beta=2.0, label_smoothing=0.3)),
    ("dpo", dict(f_divergence_type="forward_kl", beta=0.3)),
    ("dpo", dict(f_divergence_type="js_divergence", label_smoothing=0.1)),
    ("dpo", dict(f_divergence_type="alpha_divergence", variant="robust", label_smoothing=0.1)),
    ("dpo", dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.8)),
    ("dpo", dict(f_divergence_type="alpha_divergence", variant="hinge", beta=0.02)),
    ("exo_pair", {}),
    ("exo_pair", dict(beta=0.4, label_smoothing=0.1)),
    ("discopop", {}),
    ("discopop", dict(beta=0.3, discopop_tau=0.8)),
    ("discopop", dict(beta=0.3, discopop_tau=1.5)),
    ("aot", {}),
    ("aot", dict(beta=0.3, label_smoothing=0.1)),
    ("aot_unpaired", {}),
    ("aot_unpaired", dict(beta=0.3, label_smoothing=0.1)),
    ("alphapo", {}),
    ("alphapo", dict(alpha=0.0)),
    ("alphapo", dict(alpha=-0.5, beta=3.0, gamma=0.2)),
    ("simpo", {}),
    ("simpo", dict(beta=1.5, gamma=0.2)),
    ("orpo", {}),
    ("orpo", dict(odds_weight=1.0)),
    ("cpo", {}),
    ("cpo", dict(beta=0.2, nll_weight=0.3)),
    ("sppo", dict(beta=0.05)),
    ("nca", {}),
    ("apo_zero", {}),
    ("apo_down", dict(beta=0.3)),
    ("bco", {}),
    ("kto", {}),
    ("kto", dict(beta=0.3, chosen_weight=1.3, rejected_weight=0.7)),
    ("bradley_terry", {}),
    ("bradley_terry", dict(center_coef=0.02)),
]
BATCH_SCALARS = ("mean_log_ratio", "kl")


def pairs(seed: int, *, count: int = 9, dtype: torch.dtype = torch.float64) -> Pairs:
    """Draw every input of every loss, with empty responses on either side."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=g, dtype=torch.float64) * scale

    def lengths() -> torch.Tensor:
        return torch.randint(1, 30, (count,), generator=g)

    case = dict(chosen_lengths=lengths(), rejected_lengths=lengths(), lengths=lengths())
    case["chosen_lengths"][0] = case["rejected_lengths"][1] = case["lengths"][2] = 0
    for side, of in (("chosen_", "chosen_"), ("rejected_", "rejected_"), ("", "")):
        new = -normal(0.5).abs() * case[of + "lengths"]
        case[side + "logps"], case[f"ref_{side}logps"] = new, new - normal(4.0)
    case |= dict(
        is_chosen=torch.rand(count, generator=g) < 0.5,
        margins=normal(1.0).abs(),
        chosen_scores=normal(2.0),
        rejected_scores=normal(2.0),
        matched_margin=normal(4.0),
        matched_chosen=normal(4.0),
        matched_rejected=normal(4.0),
    )
    scalars = dict(mean_log_ratio=normal(1.0)[0], kl=normal(1.0)[0])
    case = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.items()} | scalars
    for name in ("chosen_logps", "rejected_logps", "logps", "chosen_scores", "rejected_scores"):
        case[name].requires_grad_()
    return case


def function(name: str):
    return bradley_terry if name == "bradley_terry" else registry.get("preference", name)


def call(name: str, case: Pairs, options: dict) -> tuple[torch.Tensor, dict]:
    return registry.call(function(name), case, options)


def learned(name: str) -> tuple[str, ...]:
    if name == "kto":
        return ("logps",)
    kind = "scores" if name == "bradley_terry" else "logps"
    return (f"chosen_{kind}", f"rejected_{kind}")


def gradients(name: str, terms: torch.Tensor, case: Pairs) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(terms.sum(), [case[k] for k in learned(name)])


def kept(name: str, case: Pairs) -> torch.Tensor:
    if name == "kto":
        return case["lengths"] > 0
    return pairs_in_loss(case["chosen_lengths"], case["rejected_lengths"])


# ---------------------------------------------------------------- references


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def one(name: str, case: dict, options: dict) -> tuple[float, tuple[float, ...]]:
    """Return one term and its slopes by the learned inputs, from the paper's formula."""
    o = (
        dict(
            beta={"simpo": 2.0, "alphapo": 2.0, "discopop": 0.05}.get(name, 0.1),
            f_divergence_type="reverse_kl",
            f_alpha_divergence_coef=0.5,
            discopop_tau=0.05,
            alpha=0.25,
            variant="sigmoid",
            label_smoothing=1e-3 if name == "exo_pair" else 0.0,
            gamma=1.0,
            nll_weight=1.0,
            odds_weight=0.1,
            chosen_weight=1.0,
            rejected_weight=1.0,
            center_coef=0.0,
        )
        | options
    )
    b = o["beta"]
    if name == "kto":
        rho, z = case["logps"] - case["ref_logps"], max(case["kl"], 0.0)
        weight, sign = (o["chosen_weight"], 1) if case["is_chosen"] else (o["rejected_weight"], -1)
        p = sigmoid(b * sign * (rho - z))
        return weight * (1 - p), (-weight * p * (1 - p) * b * sign,)
    if name == "bradley_terry":
        w, lost, c = case["chosen_scores"], case["rejected_scores"], o["center_coef"]
        gap = w - lost - case["margins"]
        slope, pull = -sigmoid(-gap), 2 * c * (w + lost)
        return -log_sigmoid(gap) + c * (w + lost) ** 2, (slope + pull, -slope + pull)
    lw, ll = case["chosen_logps"], case["rejected_logps"]
    nw, nl = case["chosen_lengths"], case["rejected_lengths"]
    rw, rl = lw - case["ref_chosen_logps"], ll - case["ref_rejected_logps"]
    if name == "dpo":
        return one_dpo(rw, rl, nw, nl, o)
    if name == "simpo":
        x = b * (lw / nw - ll / nl) - o["gamma"]
        return -log_sigmoid(x), (-sigmoid(-x) * b / nw, sigmoid(-x) * b / nl)
    if name in ONE_OF:
        return ONE_OF[name](case | dict(lw=lw, ll=ll, rw=rw, rl=rl), o)
    if name == "cpo":
        x, a = b * (lw - ll), o["nll_weight"]
        return -log_sigmoid(x) - a * lw / nw, (-sigmoid(-x) * b - a / nw, sigmoid(-x) * b)
    if name == "orpo":
        pw, pl, k = math.exp(lw / nw), math.exp(ll / nl), o["odds_weight"]
        x = math.log(pw / (1 - pw)) - math.log(pl / (1 - pl))
        s = k * sigmoid(-x)
        return (-lw / nw - k * log_sigmoid(x), (-1 / nw - s / (1 - pw) / nw, s / (1 - pl) / nl))
    if name == "sppo":
        c = 1 / (2 * b)
        return (rw - c) ** 2 + (rl + c) ** 2, (2 * (rw - c), 2 * (rl + c))
    x, y = b * rw, b * rl
    if name == "nca":
        return (
            -log_sigmoid(x) - log_sigmoid(-x) / 2 - log_sigmoid(-y) / 2,
            (b * (-sigmoid(-x) + sigmoid(x) / 2), b * sigmoid(y) / 2),
        )
    if name == "apo_zero":
        return 1 - sigmoid(x) + sigmoid(y), (
            -b * sigmoid(x) * sigmoid(-x),
            b * sigmoid(y) * sigmoid(-y),
        )
    if name == "apo_down":
        h = sigmoid(x - y) * sigmoid(y - x)
        return (sigmoid(x) + 1 - sigmoid(x - y), (b * (sigmoid(x) * sigmoid(-x) - h), b * h))
    assert name == "bco"
    m = b * case["mean_log_ratio"]
    return (-log_sigmoid(x - m) - log_sigmoid(m - y), (-b * sigmoid(m - x), b * sigmoid(y - m)))


def bent(x: float, slope: float) -> tuple[float, float]:
    """(e^(slope x) - 1) / slope and its derivative; its tangent above an exponent of 20."""
    if slope == 0:
        return x, 1.0
    top = math.exp(20)
    if slope * x > 20:
        return (top * (1 + slope * x - 20) - 1) / slope, top
    return (math.exp(slope * x) - 1) / slope, math.exp(slope * x)


def one_smoothed(x: float, e: float) -> tuple[float, float]:
    value = -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)
    return value, -(1 - e) * sigmoid(-x) + e * sigmoid(x)


def one_aot(c: dict, o: dict) -> tuple[float, tuple[float, ...]]:
    b = o["beta"]
    value, slope = one_smoothed(b * (c["lw"] - c["ll"] - c["matched_margin"]), o["label_smoothing"])
    return value, (b * slope, -b * slope)


def one_aot_unpaired(c: dict, o: dict) -> tuple[float, tuple[float, ...]]:
    b, e = o["beta"], o["label_smoothing"]
    up, up_slope = one_smoothed(b * (c["rw"] - c["matched_rejected"]), e)
    down, down_slope = one_smoothed(b * (c["matched_chosen"] - c["rl"]), e)
    return (up + down) / 2, (b * up_slope, -b * down_slope)


def one_alphapo(c: dict, o: dict) -> tuple[float, tuple[float, ...]]:
    b, nw, nl = o["beta"], c["chosen_lengths"], c["rejected_lengths"]
    (w, dw), (lo, dl) = (bent(m, -o["alpha"]) for m in (c["lw"] / nw, c["ll"] / nl))
    x = b * (w - lo) - o["gamma"]
    return -log_sigmoid(x), (-sigmoid(-x) * b * dw / nw, sigmoid(-x) * b * dl / nl)


def one_exo(c: dict, o: dict) -> tuple[float, tuple[float, ...]]:
    b, e, x = o["beta"], o["label_smoothing"], o["beta"] * (c["rw"] - c["rl"])
    q, log_q, log_rest = sigmoid(x), log_sigmoid(x), log_sigmoid(-x)
    value = q * (log_q - math.log(1 - e)) + (1 - q) * (log_rest - math.log(e))
    slope = q * (1 - q) * (log_q - math.log(1 - e) - log_rest + math.log(e))
    return value, (b * slope, -b * slope)


def one_discopop(c: dict, o: dict) -> tuple[float, tuple[float, ...]]:
    b, t, x = o["beta"], o["discopop_tau"], o["beta"] * (c["rw"] - c["rl"])
    m, exponent = sigmoid(x / t), log_sigmoid(x / t) - x
    power = math.exp(min(exponent, 20)) * (1 + max(0.0, exponent - 20))
    value = -log_sigmoid(x) * (1 - m) + power
    slope = -sigmoid(-x) * (1 - m) + log_sigmoid(x) * m * (1 - m) / t
    slope += math.exp(min(exponent, 20)) * ((1 - m) / t - 1)
    return value, (b * slope, -b * slope)


ONE_OF = {
    "alphapo": one_alphapo,
    "aot": one_aot,
    "aot_unpaired": one_aot_unpaired,
    "discopop": one_discopop,
    "exo_pair": one_exo,
}


def f_slope(rho: float, o: dict) -> tuple[float, float]:
    """f'(e^rho) of a divergence, up to a constant, and its derivative by rho."""
    kind, a = o["f_divergence_type"], o["f_alpha_divergence_coef"]
    if kind == "reverse_kl":
        return rho, 1.0
    if kind == "js_divergence":
        return log_sigmoid(rho), sigmoid(-rho)
    return bent(rho, -1.0 if kind == "forward_kl" else a - 1)


def one_dpo(rw: float, rl: float, nw: int, nl: int, o: dict) -> tuple[float, tuple[float, ...]]:
    variant, b, e = o["variant"], o["beta"], o["label_smoothing"]
    per_token = variant in ("ipo", "norm")
    dw, dl = (1 / nw, 1 / nl) if per_token else (1.0, 1.0)
    (rw, fw), (rl, fl) = f_slope(rw, o), f_slope(rl, o)
    h, dw, dl = rw * dw - rl * dl, dw * fw, dl * fl
    if variant == "ipo":
        value, slope = (h - 1 / (2 * b)) ** 2, 2 * (h - 1 / (2 * b))
    elif variant == "hinge":
        value, slope = max(0.0, 1 - b * h), -b if b * h < 1 else 0.0
    elif variant == "robust":
        value = (-(1 - e) * log_sigmoid(b * h) + e * log_sigmoid(-b * h)) / (1 - 2 * e)
        slope = b * (-(1 - e) * sigmoid(-b * h) - e * sigmoid(b * h)) / (1 - 2 * e)
    else:
        value = -(1 - e) * log_sigmoid(b * h) - e * log_sigmoid(-b * h)
        slope = b * (-(1 - e) * sigmoid(-b * h) + e * sigmoid(b * h))
    return value, (slope * dw, -slope * dl)


def reference(name: str, case: Pairs, options: dict) -> torch.Tensor:
    """Return [1 + number of learned inputs, P]: terms, then gradients."""
    rows = []
    for i, is_kept in enumerate(kept(name, case).tolist()):
        row = {k: v.item() if k in BATCH_SCALARS else v[i].item() for k, v in case.items()}
        value, slopes = one(name, row, options) if is_kept else (0.0, (0.0,) * len(learned(name)))
        rows.append((value, *slopes))
    return torch.tensor(rows, dtype=torch.float64).T


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name, options", CASES)
def test_terms_and_gradients_equal_a_plain_loop(name, options, seed):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        case = pairs(seed, dtype=dtype)
        terms, _ = call(name, case, options)
        assert terms.dtype == dtype
        own, expected = [case[k] for k in learned(name)], reference(name, case, options)
        assert_loop(terms, own, expected, tolerance=tolerance)


@pytest.mark.parametrize("name, options", CASES)
@examples(
    8, seed=st.integers(0, 10_000), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
def test_empty_responses_have_zero_term_and_gradient_whatever_they_hold(
    name, options, seed, garbage
):
    clean, dirty = pairs(seed), pairs(seed)
    out = ~kept(name, clean)
    with torch.no_grad():
        for key, tensor in dirty.items():
            if tensor.is_floating_point() and key not in BATCH_SCALARS:
                tensor[out] = garbage
    assert out.any()
    own = functools.partial(call, name, options=options)
    inputs = learned(name)
    assert_nothing_is_read(own, (dirty, clean), lambda case: [case[k] for k in inputs], off=out)


@pytest.mark.parametrize("name, options", CASES)
@examples(8, seed=st.integers(0, 10_000), cut=st.integers(1, 8))
def test_permuting_and_splitting_pairs_changes_no_term_and_no_stat(name, options, seed, cut):
    case = pairs(seed)
    whole, whole_stats = call(name, case, options)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    pieces, totals = [], {}
    for members in (order[:cut], order[cut:]):
        part = {k: v if k in BATCH_SCALARS else v[members] for k, v in case.items()}
        terms, stats = call(name, part, options)
        pieces.append(terms)
        for key, pair in stats.items():
            totals[key] = torch.stack(pair) + totals.get(key, 0.0)
    assert torch.allclose(torch.cat(pieces), whole[order], atol=1e-12, rtol=1e-12)
    for key, pair in whole_stats.items():
        assert torch.allclose(totals[key], torch.stack(pair), atol=1e-9), key


@pytest.mark.parametrize("name, options", CASES)
def test_stats_are_detached_float64_scalars_named_by_their_phase(name, options):
    case = pairs(3, dtype=torch.float32)
    for key, pair in call(name, case, options)[1].items():
        assert key.startswith(("preference/", "reward_model/"))
        for value in pair:
            assert value.shape == () and value.dtype == torch.float64 and not value.requires_grad


@pytest.mark.parametrize("name, options", CASES)
def test_log_ratios_of_thousands_of_nats_stay_finite(name, options):
    for shift in (5000.0, -5000.0):
        case = pairs(4, dtype=torch.float32)
        with torch.no_grad():
            for key in learned(name):
                case[key][3:] += shift if "rejected" not in key else -shift
                case[key].clamp_(max=0.0)
        terms, _ = call(name, case, options)
        assert terms.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(name, terms, case))


# ---------------------------------------------------------------- anchors and traps


def at_reference(seed: int = 0) -> Pairs:
    case = pairs(seed)
    return case | {
        k: v.detach().clone().requires_grad_()
        for k, v in (
            ("chosen_logps", case["ref_chosen_logps"]),
            ("logps", case["ref_logps"]),
            ("rejected_logps", case["ref_rejected_logps"]),
        )
    }


def test_dpo_at_the_reference_is_ln_2():
    case = at_reference()
    for options in (
        {},
        dict(variant="norm"),
        dict(label_smoothing=0.1),
        dict(variant="robust", label_smoothing=0.1),
    ):
        terms, stats = call("dpo", case, options)
        assert terms[kept("dpo", case)].tolist() == pytest.approx([LN2] * 7, abs=1e-15)
    assert call("dpo", case, {})[0][2].item() == LN2
    assert stats["preference/accuracy"] == (3.5, 7)  # neither right nor wrong


def test_other_losses_at_the_reference():
    case = at_reference() | dict(mean_log_ratio=torch.tensor(0.0), kl=torch.tensor(0.0))
    for name, options, expected in (
        ("nca", {}, 2 * LN2),
        ("bco", {}, 2 * LN2),
        ("apo_zero", {}, 1.0),
        ("apo_down", {}, 1.0),
        ("dpo", dict(variant="hinge"), 1.0),
        ("dpo", dict(variant="ipo"), 25.0),
        ("sppo", dict(beta=0.5), 2.0),
        ("kto", {}, 0.5),
    ):
        terms, _ = call(name, case, options)
        assert terms[kept(name, case)].tolist() == pytest.approx(
            [expected] * len(terms[kept(name, case)])
        ), name


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("seed", range(4))
def test_sorted_losses_are_the_papers_over_the_whole_batch(name, seed):
    case = pairs(seed, count=23)
    keep = kept(name, case)
    sides = [case[f"{side}_logps"] - case[f"ref_{side}_logps"] for side in ("chosen", "rejected")]
    if name == "aot":
        sides = [
            case["chosen_logps"] - case["rejected_logps"],
            case["ref_chosen_logps"] - case["ref_rejected_logps"],
        ]
    upper, lower = (side[keep].sort().values for side in sides)
    x = 0.1 * (upper - lower)
    expected = (-0.9 * torch.nn.functional.logsigmoid(x)).sum()
    expected = expected - 0.1 * torch.nn.functional.logsigmoid(-x).sum()
    slopes = gradients(name, expected, case)
    constants = {k: v.detach() for k, v in case.items()}
    matched = registry.call_helper(function(name), "matched", constants, {})
    assert all(v.dtype == torch.float64 and not v.requires_grad for v in matched.values())
    order = torch.randperm(23, generator=torch.Generator().manual_seed(seed))
    shuffled = {k: v if k in BATCH_SCALARS else v[order] for k, v in constants.items()}
    again = registry.call_helper(function(name), "matched", shuffled, {})
    assert all(torch.equal(again[k], v[order]) for k, v in matched.items())
    total, parts = 0.0, []
    for rows in (order[:5], order[5:6], order[6:]):  # three micro-batches
        part = {k: v if k in BATCH_SCALARS else v[rows] for k, v in (case | matched).items()}
        parts.append(call(name, part, dict(label_smoothing=0.1))[0].sum())
    total = sum(parts)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    for own, slope in zip(gradients(name, total, case), slopes):
        torch.testing.assert_close(own, slope, rtol=1e-12, atol=1e-12)


def test_f_divergences_meet_at_their_ends():
    case = pairs(6)
    with torch.no_grad():
        for side in ("chosen", "rejected"):
            case[f"ref_{side}_logps"] = case[f"{side}_logps"] - case[f"{side}_logps"] / 50
    plain = call("dpo", case, {})[0]
    alpha = dict(f_divergence_type="alpha_divergence")
    forward = call("dpo", case, dict(f_divergence_type="forward_kl"))[0]
    for coef, end in ((1.0, plain), (1 - 1e-7, plain), (0.0, forward), (1e-7, forward)):
        own = call("dpo", case, alpha | dict(f_alpha_divergence_coef=coef))[0]
        torch.testing.assert_close(own, end, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(plain, forward)
    for variant in ("ipo", "norm"):
        with pytest.raises(ValueError, match="f_divergence_type: forward_kl has no meaning"):
            call("dpo", case, dict(variant=variant, f_divergence_type="forward_kl"))
    with pytest.raises(ValueError, match="f_alpha_divergence_coef: 0.3 has no meaning under"):
        call("dpo", case, dict(f_divergence_type="forward_kl", f_alpha_divergence_coef=0.3))


def test_alphapo_tends_to_simpo_and_is_its_papers_power():
    case = pairs(7)
    bent_little, straight = (call("alphapo", case, dict(alpha=a))[0] for a in (1e-9, 0.0))
    torch.testing.assert_close(bent_little, straight, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(straight, call("simpo", case, {})[0], rtol=0, atol=0)


def test_robust_dpo_is_unbiased_under_flipped_labels():
    case = pairs(5)
    swapped = case | {
        f"{a}{side}_{k}": case[f"{a}{other}_{k}"]
        for side, other in (("chosen", "rejected"), ("rejected", "chosen"))
        for a, k in (("", "logps"), ("ref_", "logps"), ("", "lengths"))
    }
    options = dict(variant="robust", label_smoothing=0.2)
    mixed = 0.8 * call("dpo", case, options)[0] + 0.2 * call("dpo", swapped, options)[0]
    assert torch.allclose(mixed, call("dpo", case, {})[0])


def test_ipo_and_norm_compare_per_token_and_sigmoid_does_not():
    case = pairs(6)
    longer = case | {k: v * 2 for k, v in case.items() if k.endswith(("logps", "lengths"))}
    for options in (dict(variant="ipo"), dict(variant="norm")):
        assert torch.allclose(call("dpo", longer, options)[0], call("dpo", case, options)[0])
    assert not torch.allclose(call("dpo", longer, {})[0], call("dpo", case, {})[0])


def test_cpo_and_orpo_nll_does_not_depend_on_the_micro_batch():
    case = pairs(7)
    for name in ("cpo", "orpo"):
        terms, _ = call(name, case, {})
        alone = {k: v if k in BATCH_SCALARS else v[3:4] for k, v in case.items()}
        assert torch.equal(call(name, alone, {})[0], terms[3:4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("logp", [0.0, -1e-9, -1e-6, -1e-4, -0.7, -20.0, -3000.0])
def test_orpo_is_stable_from_certain_to_impossible(logp, dtype):
    lengths = torch.ones(1, dtype=torch.int64)
    for w, lost in ((logp, -1.0), (-1.0, logp)):
        inputs = dict(
            chosen_logps=torch.tensor([w], dtype=dtype, requires_grad=True),
            rejected_logps=torch.tensor([lost], dtype=dtype, requires_grad=True),
            chosen_lengths=lengths,
            rejected_lengths=lengths,
        )
        terms, _ = registry.call(registry.get("preference", "orpo"), inputs, dict(odds_weight=1.0))
        found = gradients("orpo", terms, inputs)
        assert terms.isfinite().all() and all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("x", [-1e-12, -1e-7, -1e-3, -0.5, -math.log(2), -0.8, -5.0, -40.0, -1e4])
def test_log1mexp_keeps_its_digits_and_its_gradient(x):
    value = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    found = log1mexp(value)
    found.backward()
    exact = math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))
    slope = 1 / math.expm1(-x) if x > -700 else 0.0
    assert found.item() == pytest.approx(exact, rel=1e-14)
    assert float(value.grad) == pytest.approx(-slope, rel=1e-12, abs=1e-300)


def test_kto_clamps_the_kl_after_the_mean_and_not_before():
    logps = torch.tensor([3.0, -5.0], dtype=torch.float64)
    sums = [kto_kl(logps[i : i + 1], torch.zeros(1), lengths=torch.ones(1)) for i in (0, 1)]
    numerator, denominator = (sum(s[i] for s in sums) for i in (0, 1))
    assert float(numerator) == -2 and float(denominator) == 2
    case = pairs(1)
    below = call("kto", case | dict(kl=numerator / denominator), {})
    at_zero = call("kto", case | dict(kl=torch.tensor(0.0)), {})
    assert torch.equal(below[0], at_zero[0]) and below[1] == at_zero[1]


@examples(15, seed=st.integers(0, 10_000))
def test_kto_kl_is_a_mean_over_sequences_with_tokens(seed):
    case = pairs(seed)
    case["ref_logps"][2] = math.nan
    numerator, denominator = kto_kl(case["logps"], case["ref_logps"], lengths=case["lengths"])
    ratios = [
        a - b
        for a, b, n in zip(*(case[k].tolist() for k in ("logps", "ref_logps", "lengths")))
        if n
    ]
    assert float(numerator / denominator) == pytest.approx(sum(ratios) / len(ratios))
    assert not numerator.requires_grad


@examples(50, sizes=st.lists(st.integers(1, 6), min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_mismatched_responses_are_of_other_prompts(sizes, seed):
    ids = torch.tensor([7 * i for i, size in enumerate(sizes) for _ in range(size)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    found = mismatched(ids)
    assert (ids[found] != ids).all()
    if len(set(sizes)) == 1:
        assert torch.equal(found.sort().values, torch.arange(len(ids)))


def test_a_batch_of_one_prompt_has_no_mismatched_response():
    with pytest.raises(ValueError, match="all 3 samples are of prompt 4"):
        mismatched(torch.tensor([4, 4, 4]))
    assert mismatched(torch.tensor([], dtype=torch.int64)).tolist() == []


def test_stats_of_two_pairs_by_hand():
    case = dict(
        chosen_logps=torch.tensor([-4.0, -6.0]),
        rejected_logps=torch.tensor([-9.0, -2.0]),
        ref_chosen_logps=torch.tensor([-5.0, -5.0]),
        ref_rejected_logps=torch.tensor([-5.0, -5.0]),
        chosen_lengths=torch.tensor([2, 3]),
        rejected_lengths=torch.tensor([4, 1]),
    )
    _, stats = call("dpo", case, dict(beta=0.5))
    assert {k: (float(n), float(d)) for k, (n, d) in stats.items()} == {
        "preference/accuracy": (1, 2),
        "preference/margin": (0.5, 2),
        "preference/chosen_reward": (0, 2),
        "preference/rejected_reward": (-0.5, 2),
        "preference/chosen_logprob": (-10, 5),
        "preference/rejected_logprob": (-11, 5),
    }


def test_kto_stats_keep_the_two_labels_apart():
    case = dict(
        logps=torch.tensor([-1.0, -4.0, -9.0]),
        ref_logps=torch.full((3,), -4.0),
        is_chosen=torch.tensor([True, True, False]),
        lengths=torch.ones(3).long(),
        kl=torch.tensor(0.5),
    )
    _, stats = call("kto", case, dict(beta=1.0))
    assert {k: (float(n), float(d)) for k, (n, d) in stats.items()} == {
        "preference/accuracy": (2, 3),
        "preference/chosen_reward": (3, 2),
        "preference/rejected_reward": (-5, 1),
        "preference/kl": (1.5, 3),
    }


def test_bradley_terry_is_ln_2_for_equal_scores_and_centring_pulls_to_zero():
    score = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    inputs = dict(
        chosen_scores=score,
        rejected_scores=score.detach().clone().requires_grad_(),
        margins=torch.zeros(1),
        chosen_lengths=torch.ones(1).long(),
        rejected_lengths=torch.ones(1).long(),
    )
    terms, stats = registry.call(bradley_terry, inputs, {})
    assert terms.item() == LN2 and stats["reward_model/accuracy"] == (0.5, 1)
    terms, _ = registry.call(bradley_terry, inputs, dict(center_coef=0.01))
    pulls = gradients("bradley_terry", terms, inputs)
    assert terms.item() == pytest.approx(LN2 + 0.36) and float(sum(pulls)) == pytest.approx(0.24)


def test_a_logprob_that_is_not_a_number_is_not_hidden():
    for name, options in CASES:
        case = pairs(1)
        with torch.no_grad():
            case[learned(name)[0]][3] = math.nan
        assert call(name, case, options)[0][3].isnan(), name


def test_the_reference_gets_no_gradient():
    for name, options in CASES:
        case = pairs(1)
        constants = [
            v.requires_grad_()
            for k, v in case.items()
            if v.is_floating_point() and k not in learned(name)
        ]
        call(name, case, options)[0].sum().backward()
        assert all(v.grad is None for v in constants), name


def test_bco_reports_the_mean_log_ratio_that_it_takes_as_its_zero():
    case = pairs(8)
    _, stats = call("bco", case, dict(beta=0.3))
    total = sum(
        (case[f"{side}_logps"] - case[f"ref_{side}_logps"]).detach()[2:].sum()
        for side in ("chosen", "rejected")
    )
    assert float(stats["preference/log_ratio"][0]) == pytest.approx(float(total) / 2)
    assert stats["preference/log_ratio"][1] == 7


def test_options_out_of_range_are_refused():
    for name, options, message in (
        ("dpo", dict(beta=0.0), "beta: must be above 0"),
        ("dpo", dict(label_smoothing=0.5), "label_smoothing: must be in"),
        ("dpo", dict(variant="ipo", label_smoothing=0.1), "no meaning in the variant ipo"),
        ("dpo", dict(variant="kl"), "variant: must be sigmoid"),
        ("simpo", dict(gamma=-1.0), "gamma: must be at least 0"),
        ("cpo", dict(nll_weight=-1.0), "nll_weight: must be at least 0"),
        ("orpo", dict(odds_weight=-1.0), "odds_weight: must be at least 0"),
        ("sppo", dict(beta=-1.0), "beta: must be above 0"),
        ("nca", dict(beta=0.0), "beta: must be above 0"),
        ("kto", dict(chosen_weight=-1.0), "chosen_weight: must be at least 0"),
        ("bradley_terry", dict(center_coef=-1.0), "center_coef: must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call(name, pairs(0), options)
