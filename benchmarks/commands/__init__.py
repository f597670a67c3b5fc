"""The commands of `python -m benchmarks`, thin: each reads its arguments, measures, and writes results/."""
