"""Readers of image sets and their ground truth, as published; training and `cooc bench` share them."""
