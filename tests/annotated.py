"""A tour of the package with every annotation checked, shapes and dtypes included.

A program of its own, for `test_annotations`: what wrong input does is tested elsewhere,
and the check would come before flowsim's own messages.
"""

from jaxtyping import install_import_hook

with install_import_hook("flowsim", "beartype.beartype"):
    import flowsim as fs
    from flowsim import empirical, linearised, plots
    from flowsim.batches import ChainBatches
    from flowsim.solvers import RungeKuttaChebyshev
    from flowsim.sweep import sweep

import functools as ft

import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)

KEY = jax.random.key(0)
chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)
loss = fs.PopulationLoss(chain)
model = fs.AttentionModel.init(KEY, vocab=4, width=4, scale=1e-2)

# Flows, in every way that they can be asked for.
observe = ft.partial(fs.diagnose, loss)
run = fs.gradient_flow(loss, model, t1=400.0, rtol=1e-6, observe=observe)
times = fs.gradient_flow(loss, model, t1=5.0, save=jnp.array([1.0, 2.0]))
explicit = fs.gradient_flow(loss, model, t1=5.0, solver=RungeKuttaChebyshev())
single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
assert fs.gradient_flow(loss, single, t1=5.0).succeeded
models = jax.vmap(
    lambda scale: fs.AttentionModel.init(KEY, vocab=4, width=4, scale=scale)
)(jnp.array([1e-2, 1e-1]))
assert jax.vmap(lambda m: fs.gradient_flow(loss, m, t1=5.0).losses[-1])(models).all()
assert sweep(loss, models, t1=5.0, ts=[1.0]).succeeded.all()
jax.jacfwd(
    lambda pi: fs.gradient_flow(
        fs.PopulationLoss(fs.lazy_chain(pi, 0.5)), model, t1=5.0
    ).losses[-1]
)(jnp.array([0.6, 0.2, 0.15, 0.05]))

# Critical points, spectra, stages.
points = fs.find_saddles(run, loss)
spectrum = fs.spectrum(loss, points[0].model)
fs.spectrum(loss, points[0].model, num=2, method="matrix-free")
fs.find_stages(run, loss)
second = fs.theory.second_critical_point(chain, width=4, key_width=4)
fs.find_critical_point(loss, second)

# Local models.
beside = jax.tree.map(lambda x: x + 1e-3, second)
flow = linearised.linear_flow(loss, second)
print(flow, linearised.predict_exit(flow, beside, 1.0))

# Training and text.
batches = ChainBatches(chain, length=16, size=8)
trained = fs.train(batches, model, 0.1, 20, key=KEY, evaluate=loss, observe=observe)
setting = empirical.sampled_setting(chain, num_tokens=20_000)
study = empirical.study_text(setting, width=4, length=16, batch=8, num_steps=20)

# Figures.
plots.cycle_figure(run, chain)
plots.comparison_figure(study.training, study.flow, study.setting.chain)
