"""Toy problems that several test files share."""

import functools

import jax
import jax.numpy as jnp

from flowsim.diagnostics import diagnose
from flowsim.flow import gradient_flow
from flowsim.loss import PopulationLoss
from flowsim.markov import MarkovChain, lazy_chain, metropolis_chain
from flowsim.model import AttentionModel

# Chains: one of every kind that the theory claims to cover, all on four tokens so that
# compiled code is shared.


def dense_chain(seed: int, num_states: int) -> MarkovChain:
    """A random chain without any structure; its stationary law is not ordered."""
    logits = jax.random.normal(jax.random.key(seed), (num_states, num_states))
    return MarkovChain(jax.nn.softmax(1.5 * logits, axis=-1))


CHAINS = {
    "default": lambda: lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5),
    "lazy with negative lam": lambda: lazy_chain([0.2, 0.4, 0.25, 0.15], -0.15),
    "metropolis": lambda: metropolis_chain([0.1, 0.5, 0.33, 0.07]),
    "dense, focus": lambda: dense_chain(2, 4),
    "dense, defocus": lambda: dense_chain(4, 4),
}


def named_chain(name: str) -> MarkovChain:
    """The chain of that name in `CHAINS`."""
    return CHAINS[name]()


def random_model(
    chain: MarkovChain, *, seed=0, width=5, key_width=3, scale=0.7, **options
) -> AttentionModel:
    """A generic point, far from every critical point."""
    return AttentionModel.init(
        jax.random.key(seed),
        vocab=chain.num_states,
        width=width,
        key_width=key_width,
        scale=scale,
        **options,
    )


# Flows with known solutions or known difficulties, for the solvers.


class DeepLinearNetwork:
    """|S - B A|^2 / 2 from a balanced start, one saddle per mode of S.

    With A = sqrt(u0) V^T and B = U sqrt(u0) on the singular vectors of S, each mode
    obeys u' = 2 u (s - u) alone: a logistic curve (Saxe, McClelland, Ganguli 2014,
    "Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks"). The flow stays near zero, then near the network of the largest mode
    alone, then of two modes, ...
    """

    def __init__(self, strengths, start=1e-6, seed=0):
        self.strengths = jnp.asarray(strengths)
        num = self.strengths.size
        keys = jax.random.split(jax.random.key(seed))
        self.left, self.right = (
            jnp.linalg.qr(jax.random.normal(key, (num, num)))[0] for key in keys
        )
        self.target = (self.left * self.strengths) @ self.right.T
        self.start = start

    def loss(self, model):
        return 0.5 * jnp.sum((self.target - model["B"] @ model["A"]) ** 2)

    def at(self, t):
        """The exact solution."""
        growth = jnp.exp(-2 * self.strengths * t)
        modes = self.strengths / (1 + growth * (self.strengths / self.start - 1))
        return {
            "A": jnp.sqrt(modes)[:, None] * self.right.T,
            "B": self.left * jnp.sqrt(modes),
        }


def allen_cahn(u, width=0.05):
    """Energy (over the spacing) of a chain of double wells: metastable and stiff.

    The gradient flow is u_t = width^2 u_xx - u (u^2 - 1) on (0, 1) with free ends.
    Layers move exponentially slowly until two of them meet (Carr, Pego 1989).
    """
    spacing = 1 / u.size
    bending = 0.5 * width**2 * jnp.sum(jnp.diff(u) ** 2) / spacing**2
    return bending + 0.25 * jnp.sum((u**2 - 1) ** 2)


# Objectives with saddles in known places, and flows past them.


def hyperbolic(y):
    """Origin a saddle of index 1, the hyperbola y0 y1 = 1 a line of minima."""
    return 0.5 * (1 - y[0] * y[1]) ** 2


def two_modes(y):
    """Saddles at losses .505 and .005, minimum 0: two products, learnt in turn."""
    sigma = jnp.array([1.0, 0.1])
    return 0.5 * jnp.sum((sigma - y["u"] * y["v"]) ** 2)


@functools.cache
def two_mode_run(eps, t1=400.0):
    """From u = v = eps; every caller shares the run."""
    start = {"u": jnp.full(2, eps), "v": jnp.full(2, eps)}
    return gradient_flow(two_modes, start, t1=t1)


@functools.cache
def default_cycle(eps):
    """The whole cycle on the default chain, width 16; every caller shares the run."""
    objective = PopulationLoss(named_chain("default"))
    model = AttentionModel.init(jax.random.key(0), vocab=4, width=16, scale=eps)
    return objective, gradient_flow(objective, model, t1=2e4)


@functools.cache
def observed_flow(name="default", t1=150.0):
    """A chain of `CHAINS` and its flow, watched by `diagnose`."""
    chain = named_chain(name)
    # Dense for all, so that one compiled flow serves them.
    loss = PopulationLoss(MarkovChain(chain.transition, chain.stationary))
    model = AttentionModel.init(jax.random.key(0), vocab=4, width=8, scale=1e-2)
    observe = jax.tree_util.Partial(diagnose, loss)
    return chain, gradient_flow(loss, model, t1=t1, observe=observe)


# A text of eight words, for what reads one.

STORY = "the cat saw the dog . the dog ran . a cat ran to the dog .\n"
