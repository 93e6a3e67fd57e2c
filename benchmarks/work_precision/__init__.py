"""Problems, methods and the figure of `benchmarks/solvers.py`."""
