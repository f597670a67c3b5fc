"""Where the networks' weights come from, and how we know that they are the right ones.

    source -> file, sha256 checked -> tensors, content hash checked -> safetensors in the cache

A set has several sources, tried in order, because links die and many machines reach only a package index. Whatever the
source, the tensors must have the same `content_hash`; that hash is what an index stores. Nothing that was downloaded is
ever executed: archives are opened as files, and pickles by readers that admit nothing but tensors and arrays.

    sources.py   where files come from: model hosts, and package indexes through their own clients
    readers.py   files as they were published -> tensors as our networks want them
    table.py     WEIGHTS: the known sets with their sources, licences and hashes
    cache.py     what is on this machine: load, fetch, verify, export, import

What is kept (float32, torchvision's names, no classifier, no batch counters):

- `vgg16-caffe`: the features of the Oxford/Caffe VGG16, the paper's network. Input: **RGB**, 0..255, minus the mean
  (123.68, 116.779, 103.939), no division by a standard deviation. Caffe and Keras hold the first kernels for BGR input;
  they are flipped once, when the archive is read.
- `vgg16`: the features of torchvision's VGG16. Input: RGB, 0..1, torchvision's mean and standard deviation.
- `efficientnet-lite0`, `efficientnet-lite2`: names as in the published .pth. Input: RGB, (0..255 - 127) / 128.
- `resnet50-caffe`: ResNet-50 of its authors (He et al. 2016), as Keras carries it. Input: as for `vgg16-caffe`, and its
  first kernels are flipped too. The values are Keras', under torchvision's names, and nothing is folded: each
  convolution has a bias, each batch norm its four vectors, made for an epsilon of 1e-3.
- `resnet50`, `resnet101`: torchvision's. Only the official file, or a state dict that the user imports.
- `timm:NAME`: what timm publishes for any of its models, or a checkpoint that the user imports under that name.
- `xfeat`: local features (Potje et al. 2024), names as in the published xfeat.pt. Input: grey; normalised inside.

The cache is `$COOC_HOME`, else the platform's cache folder. `COOC_OFFLINE=1` forbids all fetching.
"""

from cooc.weights.cache import (
    WeightStatus,
    export_weights,
    fetch_weights,
    import_weights,
    load_weights,
    verify_weights,
    weights_home,
    weights_status,
)
from cooc.weights.sources import IndexFile, NpmFile, OfficialFile, TimmFile
from cooc.weights.table import WEIGHTS, WeightSet, content_hash

__all__ = [
    "WEIGHTS",
    "IndexFile",
    "NpmFile",
    "OfficialFile",
    "TimmFile",
    "WeightSet",
    "WeightStatus",
    "content_hash",
    "export_weights",
    "fetch_weights",
    "import_weights",
    "load_weights",
    "verify_weights",
    "weights_home",
    "weights_status",
]
