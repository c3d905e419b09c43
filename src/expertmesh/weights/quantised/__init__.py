"""Weights as they are published: 8- and 4-bit codes with scales, read as the values that they stand for.

`formats` has the arithmetic, `tensor` what a box needs of the files, `published` which file tensors belong together.
"""
