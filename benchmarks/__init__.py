"""How cooc measures itself: speed, kernels, engines, growth, stores, serving, the paper's tables and figures.

    python -m benchmarks --help        from a clone: this is no part of the wheel

Each command writes a file to results/, with its command, commit and machine. `python -m benchmarks tables --write`
renews the tables of README.md and docs/ from those files.
"""
