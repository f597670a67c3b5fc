"""Published benchmarks and the user's own labelled folders: read, run, reported."""
