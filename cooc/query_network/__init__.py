"""The descriptor of an index without torch: a search on a CPU takes less time than torch takes to load.

    running.py   what was kept, run by OpenCV and numpy; imports no torch
    writing.py   a Descriptor that has been loaded -> files in the user's cache, for the next process
    graph.py     a convolutional network -> ONNX, as far as few operators go

What is kept is one folder for each descriptor, by its fingerprint and settings:

    network.onnx     the graph; weights.bin beside it has its numbers
    whitening.npy    (1 + d, D): the mean, then the projection
    about.json       everything else, and a checksum of each of the other files

Where nothing is kept, or something else, or where it is damaged, the Descriptor describes the query.
"""
