"""`verify`: every claim of the theory, measured on one chain."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from .. import _trees, corpus
from ..loss import PopulationLoss
from ..markov import MarkovChain, lazy_chain
from ..saddles import find_saddles
from ..stages import find_stages
from .claims import Claim, Verification
from .early_stages import (
    early_claims,
    follow,
    further_claims,
    random_direction,
)
from .flows import observed_flow
from .local_models import local_model_claims
from .second_saddle import sign_claims
from .whole_cycle import (
    approaches,
    conservation_claims,
    plateau_claims,
    repetition_claims,
)

_SCALES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


def verify(
    chain: MarkovChain | None = None,
    *,
    width: int = 16,
    key_width: int | None = None,
    scale: float = 1e-3,
    plateau_scales: tuple[float, float] = (1e-5, 1e-6),
    scales: Sequence[float] = _SCALES,
    t1: float = 2e4,
    rtol: float = 1e-8,
    key: PRNGKeyArray | None = None,
    shipped: bool = True,
    local_models: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Verification:
    """Hold the predictions of the theory against measurement, one claim a row.

    Args:
        chain: the chain; by default the lazy chain with pi = (.75, .19, .05, .01) and
            lam = .5. Meant for small vocabularies: spectra are dense, and one whole
            cycle has to end by `t1`.
        width, key_width: embedding width m and key width k (m when absent).
        scale: eps of the run through the whole cycle.
        plateau_scales: two falling eps; the saddles whose distance falls from one to
            the other are held against the predicted plateaus.
        scales: eps of the escape-time law, falling; at least two.
        t1: end of the whole cycle (flow time).
        rtol: relative tolerance of all flows.
        key: of the random directions; `jax.random.key(0)` when absent.
        shipped: also measure the sign of c on the chains that come with the package.
        local_models: also measure the three local models: the linearised flow, the
            rank-one manifold, and the unfolding of its degenerate point, on three
            families of chains whatever `chain` is; and stages I and II on a member of
            each family but the first.
        announce: called with a few words before each group of claims.

    Raises:
        ValueError: in single precision; for scales that do not fall.

    References:
        Chen, Lin, Xu and Luo (2026), arXiv:2605.01199: stages I to IV, Lemma 3.1.
    """
    if jnp.result_type(float) != jnp.float64:
        raise ValueError(
            "verify needs double precision: jax.config.update('jax_enable_x64', True)."
        )
    if len(scales) < 2 or any(
        not 0 < small < large for large, small in itertools.pairwise(scales)
    ):
        raise ValueError(
            f"scales must be at least two positive numbers that fall; got {scales}."
        )
    if not 0 < plateau_scales[1] < plateau_scales[0]:
        raise ValueError(
            "plateau_scales must be two positive numbers that fall; "
            f"got {plateau_scales}."
        )
    chain = lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5) if chain is None else chain
    loss = PopulationLoss(chain.to_dense())
    key = jax.random.key(0) if key is None else key
    start_key, attention_key = jax.random.split(key)
    direction = random_direction(loss, start_key, width=width, key_width=key_width)
    say = (lambda _: None) if announce is None else announce
    claims: list[Claim] = []

    say("one whole cycle")
    run = observed_flow(loss, _trees.scale(scale, direction), t1=t1, rtol=rtol)
    claims += conservation_claims(loss, run)

    say("the origin, theta_c^1 and the escapes from both")
    escapes = follow(loss, direction, scales, rtol)
    claims += early_claims(loss, direction, escapes, attention_key)
    if shipped:
        say("the shipped chains")
        claims += sign_claims(_shipped_chains(), attention_key)

    say("saddles and stages of the cycle")
    large, small = (
        find_saddles(
            observed_flow(loss, _trees.scale(eps, direction), t1=t1, rtol=rtol), loss
        )
        for eps in plateau_scales
    )
    found = approaches(large, small, plateau_scales)
    claims += plateau_claims(loss, run, found, plateau_scales)
    claims += repetition_claims(loss, find_stages(run, loss))
    if local_models:
        say("the local models")
        claims += further_claims(loss, direction, escapes)
        claims += local_model_claims(loss, run, announce=say)
    return Verification(tuple(claims))


def _shipped_chains() -> dict[str, MarkovChain]:
    return {
        f"{name}, V = {size}": corpus.load_chain(name, vocab=size)
        for name, text in corpus.CORPORA.items()
        for size in text.vocab_sizes
    }
