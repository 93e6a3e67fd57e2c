"""Eigenpairs of the Jacobian: dense, matrix-free, and SciPy on the same products.

    python benchmarks/spectrum.py [--quick] [--dense-up-to N] [--json FILE]

Both ends, ten pairs each, at the second critical point theta_c^1 of three chains: the
default one (n = 640), and the WikiText-2 bigrams with 64 and 256 tokens (n = 6,144 and
18,432). Its spectrum is the hard part of the subject: eigenvalues of multiplicity k,
opposite pairs, and thousands of zeros.

Every row is one process with one BLAS thread. Columns: seconds of the first call beyond
the second (compilation), seconds of the second call, Hessian-vector products, largest
residual |J v - lambda v| over the spectral radius (products made afresh), largest
deviation of the eigenvalues from the first row of the same n over the radius, and peak
memory of the process beside what Python, JAX and the problem took before. A dense
matrix of 18,432 rows takes 2.7 GB and hours to diagonalise on one core: it is left out
unless asked for.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

PROBLEMS = {  # n: vocabulary, width = key width
    640: (4, 16),
    6144: (64, 32),
    18432: (256, 32),
}
NUM = 10  # pairs at each end


def problem(size: int):
    """Objective and critical point with `size` parameters."""
    import flowsim as fs

    vocab, width = PROBLEMS[size]
    if vocab == 4:
        chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)
    else:
        chain = fs.load_chain("wikitext2", vocab=vocab)
    point = fs.theory.second_critical_point(chain, width=width, key_width=width)
    return fs.PopulationLoss(chain), point


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if platform.system() == "Darwin" else 1024 * size


def with_flowsim(objective, point, method: str):
    """A function of a seed that returns values, residuals, products."""
    import jax

    from flowsim.spectrum import spectrum

    def solve(seed: int):
        found = spectrum(
            objective, point, num=NUM, method=method, key=jax.random.key(seed)
        )
        jax.block_until_ready(found.values)
        return found.values, found.residuals, int(found.num_products)

    return solve


def with_scipy(objective, point):
    """ARPACK, both ends at once, on jitted products of one vector."""
    import jax
    import numpy as np
    import scipy.sparse.linalg

    from flowsim import _trees

    flat, unravel = _trees.ravel(point)
    gradient = jax.grad(lambda v: objective(unravel(v)))
    product = jax.jit(lambda v: -jax.jvp(gradient, (flat,), (v,))[1])
    counter = [0]

    def matvec(vector):
        counter[0] += 1
        return np.asarray(product(vector.ravel()))

    operator = scipy.sparse.linalg.LinearOperator((flat.size,) * 2, matvec, dtype=float)

    def solve(seed: int):
        counter[0] = 0
        start = np.random.default_rng(seed).normal(size=flat.size)
        values, vectors = scipy.sparse.linalg.eigsh(
            operator, k=2 * NUM, which="BE", tol=1e-10, v0=start
        )
        products = counter[0]
        order = np.argsort(values)
        values, vectors = values[order], vectors[:, order]
        images = np.stack([matvec(column) for column in vectors.T], axis=1)
        return values, np.linalg.norm(images - values * vectors, axis=0), products

    return solve


def worker(size: int, method: str) -> dict:
    """One row of the table."""
    import jax
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    objective, point = problem(size)
    jax.block_until_ready(point)
    before = peak_bytes()
    if method == "scipy":
        solve = with_scipy(objective, point)
    else:
        solve = with_flowsim(objective, point, method)
    times = []
    for seed in (0, 1):
        start = time.perf_counter()
        values, residuals, products = solve(seed)
        times.append(time.perf_counter() - start)
    radius = float(np.max(np.abs(values)))
    return {
        "n": size,
        "method": method,
        "compile_s": times[0] - times[1],
        "steady_s": times[1],
        "products": products,
        "residual": float(np.max(residuals)) / radius,
        "values": np.asarray(values).tolist(),
        "peak_mb": (peak_bytes() - before) / 2**20,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def run(size: int, method: str) -> dict:
    """The same in a process of its own, so that its peak memory is its own."""
    command = [sys.executable, __file__, "--worker", str(size), method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{method}, n = {size}:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="n = 640 only")
    parser.add_argument("--dense-up-to", type=int, default=2000, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", nargs=2, metavar=("N", "METHOD"))
    options = parser.parse_args()
    if options.worker:
        size, method = options.worker
        print(json.dumps(worker(int(size), method)))
        return

    rows = []
    header = (
        f"{'n':>6}  {'method':<12}{'compile s':>10}{'steady s':>10}{'products':>10}"
        f"{'residual':>10}{'deviation':>11}{'peak MB':>9}"
    )
    print(header)
    for size in [640] if options.quick else PROBLEMS:
        reference = None
        for method in ("dense", "matrix-free", "scipy"):
            if method == "dense" and size > options.dense_up_to:
                continue
            row = run(size, method)
            values = row["values"]
            reference = values if reference is None else reference
            radius = max(map(abs, reference))
            pairs = zip(values, reference, strict=True)
            row["deviation"] = max(abs(a - b) for a, b in pairs) / radius
            rows.append(row)
            print(
                f"{size:>6}  {method:<12}{row['compile_s']:>10.2f}"
                f"{row['steady_s']:>10.2f}{row['products']:>10}"
                f"{row['residual']:>10.1e}{row['deviation']:>11.1e}"
                f"{row['peak_mb']:>9.0f}",
                flush=True,
            )
    print(f"{rows[0]['device']}, double precision, JAX {rows[0]['jax']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
