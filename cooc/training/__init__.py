"""Learning co-occurrences (section 5 of the paper): photos -> activations, kept -> tuples -> CoOcNet -> a filter.

tuples.py         labelled photos; which of them match; hard negatives
verification.py   which photos of one label show the same thing, by the geometry of their activations
mining.py         pairs without labels: pictures of an index that are proven to show the same thing
cache.py          activations of the frozen network, computed once, padded exactly
losses.py         contrastive (the paper's), triplet, smooth-AP
network.py        CoOcNet: activations -> co-occurrences with a learned filter -> pooled unit vectors
train.py          the loop: mine, step, validate, keep the best
checkpoint.py     its log and checkpoint, from which it goes on
processes.py      one process or several
artefacts.py      what a run leaves, if photos held out are found better: an artefact that is a recipe; and run.json
filters.py        a filter compressed, taken over from others, and what it learned most
"""
