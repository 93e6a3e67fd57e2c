"""Empirical claims: training against the flow, finite contexts and samples, controls.

Unlike the claims of the theory these hold within statistical error: their tolerances
are wide and stated, and every row says what it was measured on.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .. import corpus, empirical, theory
from ..markov import MarkovChain, lazy_chain
from ..model import AttentionModel
from ..trajectory import Trajectory
from .claims import Claim, Verification, compare

_PAPER = "arXiv:2605.01199, experiments"
_END = 450.0  # Flow time of training and controls.


def verify_empirical(
    *,
    settings: dict[str, empirical.TextSetting] | None = None,
    num_steps: int = 2250,
    key: PRNGKeyArray | None = None,
    announce: Callable[[str], None] | None = None,
) -> Verification:
    """Hold the paper's empirical claims against measurement, one claim a row.

    Args:
        settings: texts by name; by default sequences sampled from the shipped chains
            of 64 tokens.
        num_steps: training steps of 0.2 flow time on each text; at least 1,000. The
            second direction of both corpora needs 2,000.
        key: of all random numbers; ``jax.random.key(0)`` when absent.
        announce: called with a few words before each group of claims.

    Raises:
        ValueError: fewer than 1,000 steps.
    """
    if num_steps < 1000:
        raise ValueError(f"num_steps must be at least 1000; got {num_steps}.")
    say = (lambda _: None) if announce is None else announce
    key = jax.random.key(0) if key is None else key
    if settings is None:
        settings = {
            name: empirical.sampled_setting(corpus.load_chain(name, vocab=64))
            for name in corpus.CORPORA
        }
    claims: list[Claim] = []
    for name, setting in settings.items():
        say(f"training: {name}")
        study = empirical.study_text(setting, num_steps=num_steps, key=key)
        claims += _text_claims(name, study)
        say(f"controls: {name}")
        claims += _no_bigrams_claims(name, setting.chain, key)
        claims += _shuffled_claims(name, setting, num_steps, key)
        claims += _limit_claims(name, setting.chain, key)
    say("finite contexts and samples")
    claims += _scaling_claims(key)
    say("other transition matrices")
    claims += _matrix_claims(key)
    return Verification(tuple(claims))


def _text_claims(name: str, study: empirical.TextStudy) -> list[Claim]:
    """Training goes through the events of the population flow, at the same times."""
    training, flow = study.events
    source = f"{study.setting.source}; plain gradient descent, 512 x 256 tokens a step"
    worst = empirical.agreement(study, 200.0)
    claims = [
        compare(
            f"{name}: training / flow - 1 of the {quantity}, to flow time 200",
            _PAPER,
            0.0,
            error,
            tolerance,
            f"largest, at {time:.0f}; {source}",
            scale=1.0,
        )
        for (quantity, (error, time)), tolerance in zip(
            worst.items(), (0.01, 0.06), strict=True
        )
    ]
    for event, tolerance in (
        ("sigma2/sigma1 below .05 at", 0.05),
        ("attention peak", 0.06),
        ("attention peak at", 0.12),
        ("second direction at", 0.1),
    ):
        predicted, measured = (part.row()[event] for part in (flow, training))
        claims.append(
            compare(
                f"{name}: {event}, flow and training",
                _PAPER,
                np.nan if predicted is None else predicted,
                np.nan if measured is None else measured,
                tolerance,
                source,
                scale=None if predicted is not None else 1.0,
            )
        )
    return claims


def _scaling_claims(key: PRNGKeyArray) -> list[Claim]:
    chain = lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)
    start_key, context_key, sample_key = jax.random.split(key, 3)
    model = AttentionModel.init(start_key, vocab=4, width=16, scale=1e-3)
    context = empirical.context_law(
        chain,
        model,
        t1=12.5,
        lengths=(16, 64, 256),
        num_windows=2**14,
        key=context_key,
    )
    samples = empirical.sample_law(chain, model, t1=12.5, key=sample_key)
    errors = ", ".join(f"{error:.3g}" for error in context.errors)
    return [
        compare(
            "finite contexts: relative parameter error = O(1/s): exponent",
            _PAPER,
            -1.0,
            context.exponent,
            0.15,
            f"at flow time 12.5, s = 16, 64, 256: {errors}",
        ),
        compare(
            "finite samples: relative parameter error = O(N^-1/2): exponent",
            _PAPER,
            -0.5,
            samples.exponent,
            0.25,
            "at flow time 12.5, s = 256, N = 64, 512, 4096; rms of 12 samples: "
            + ", ".join(f"{error:.3g}" for error in samples.errors),
        ),
    ]


def _matrix_claims(key: PRNGKeyArray) -> list[Claim]:
    """Condensation takes the same time for all matrices; focus takes 1/|c|."""
    chains = empirical.same_law_chains([0.75, 0.19, 0.05, 0.01])
    found = empirical.stage_times(chains, key=key)
    times = [stages.condensation for stages in found]
    claims = [
        compare(
            "same pi, other P: T_I is the same",
            "ablation",
            1.0,
            max(times) / min(times),
            0.02,
            "largest over smallest; " + ", ".join(chains),
        )
    ]
    for stages in found:
        name, rate = stages.name, stages.focus_rate
        slope = np.nan if stages.focus_slope is None else stages.focus_slope
        change = np.nan if stages.attention is None else stages.attention
        how = (
            f"c = {rate:.4g}, eps = 1e-5 and 1e-6, T_I = {stages.condensation:.5g}, "
            f"T_II = {np.nan if stages.focus is None else stages.focus:.5g}"
        )
        claims += [
            compare(
                f"{name}: |c| d(T_II - T_I)/dlog(1/eps) -> 1",
                "ablation",
                1.0,
                abs(rate) * slope,
                0.05,
                how,
            ),
            compare(
                f"{name}: attention moves to frequent tokens where c > 0",
                "ablation",
                np.sign(rate),
                np.sign(change),
                0.0,
                f"sign of the change of mean attention at T_II, {change:.3g}; {how}",
            ),
        ]
    return claims


def _no_bigrams_claims(name: str, chain: MarkovChain, key: PRNGKeyArray) -> list[Claim]:
    """The same tokens, independent: nothing after the first bump of attention."""
    independent = lazy_chain(chain.stationary, 0.0, tokens=chain.tokens)
    model, _ = _start(independent, jnp.float64, key)
    run = empirical.follow_flow(independent, model, _END)
    how = f"population flow with the law of {name} and lam = 0, to flow time {_END:g}"
    return [
        compare(
            f"{name}, lam = 0: c = 0",
            "stage II",
            0.0,
            theory.focus_rate(independent),
            1e-12,
            f"{how}; scale |c| of the bigrams",
            scale=abs(float(theory.focus_rate(chain))),
        ),
        # The random Phi of the start moves attention by 1e-5 or so.
        *_first_bump_alone(f"{name}, lam = 0", run, 1e-3, how),
    ]


def _shuffled_claims(
    name: str, setting: empirical.TextSetting, num_steps: int, key: PRNGKeyArray
) -> list[Claim]:
    """The same tokens in random order, trained on like the text."""
    mixed = empirical.shuffled(setting)
    model, batch_key = _start(mixed.chain, jnp.float32, key)
    run = empirical.train_on(
        mixed, model, 0.2, num_steps, length=256, batch=512, key=batch_key
    )
    how = f"{mixed.source}; plain gradient descent, {num_steps} steps"
    return _first_bump_alone(f"{name}, shuffled", run, 0.03, how)


def _first_bump_alone(
    name: str, run: Trajectory, tolerance: float, how: str
) -> list[Claim]:
    """What is there without bigrams, and what is not."""
    events = empirical.find_events(run)
    attention = run.observables.mean_top_attention
    return [
        compare(
            f"{name}: the first rise of attention is there",
            "control",
            1.0,
            float(attention.max() > 1.05 * attention[0]),
            0.0,
            "1 if attention on the top token rises by more than 5 %; highest over "
            f"start {float(attention.max() / attention[0]):.4g}; {how}",
        ),
        compare(
            f"{name}: attention does not fall below pi",
            "control",
            1.0,
            attention.min() / attention[0],
            tolerance,
            f"lowest attention on the top token over its start; {how}",
        ),
        compare(
            f"{name}: no second direction",
            "control",
            0.0,
            0.0 if events.second_direction is None else 1.0,
            0.0,
            f"1 if sigma2/sigma1 of W0 is back above .1; {how}",
            scale=1.0,
        ),
    ]


def _limit_claims(name: str, chain: MarkovChain, key: PRNGKeyArray) -> list[Claim]:
    """As eps -> 0 attention goes where the sign of c says."""
    beside = empirical.leave_second_point(chain, key=key)
    return [
        compare(
            f"{name}, eps -> 0: |c| dT/dlog(1/eps) -> 1 from theta_c^1",
            "stage II",
            1.0,
            beside.slopes[-1],
            0.02,
            _described(beside),
        ),
        *(
            compare(
                f"{name}, eps -> 0 from {found.start}: attention moves by the sign of "
                "c",
                "stage II",
                np.sign(found.focus_rate),
                np.sign(found.changes[-1]),
                0.0,
                _described(found),
            )
            for found in (beside, empirical.leave_origin(chain, key=key))
        ),
    ]


def _described(found: empirical.Departure) -> str:
    changes = ", ".join(
        f"{change:+.2%} from eps = {scale:g}"
        for scale, change in zip(found.scales, found.changes, strict=True)
    )
    return (
        f"c = {found.focus_rate:.4g}; population flow, width 4; attention on the top "
        f"token when |Phi| = {found.level:g}: {changes}"
    )


def _start(chain: MarkovChain, dtype: Any, key: PRNGKeyArray):
    return empirical.draw_start(chain, width=32, scale=1e-2, dtype=dtype, key=key)
