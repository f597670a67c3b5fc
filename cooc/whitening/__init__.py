"""Whitening: vectors of D dimensions -> L2 -> (x - mean) @ projection.T -> L2 -> vectors of d dimensions.

Channels that fire together count twice in an inner product. Whitening, fitted once on other pictures, undoes that:

    PCA      projection = diag(eigenvalue^-exponent) V^T     eigenvectors V of the covariance, decreasing order
    learned  projection = V^T P1                             P1 undoes the covariance of matching-pair differences,
                                                             V rotates what is left to its principal axes
    adapted  projection = P1 times that of another one       P1 as above, of its vectors, shrunk: for few pairs;
                                                             the mean is that of the new vectors

Exponent 0.5 makes the covariance of the training vectors the identity, smaller ones are softer, 0 only rotates. Rows of
the projection are ordered, so the first d of them are the whitening to d (`Whitening.truncate`). Fits run in float64.
"""

from cooc.whitening.files import STORAGE, Storage, load, save
from cooc.whitening.fitting import PCAFitter, adapt, fit_learned, fit_pca
from cooc.whitening.layer import Whitening, whiten

__all__ = ["STORAGE", "PCAFitter", "Storage", "Whitening", "adapt", "fit_learned", "fit_pca", "load", "save", "whiten"]
