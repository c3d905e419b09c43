"""Read and write published quantised weights: 8- and 4-bit codes with scales, read as the values that they represent.

`tensor` computes which bytes of the files a box needs and decodes them; `published` finds which file tensors belong
together, and which codes can stay in memory; `encode` has the formats that can be written, and saves tensors as their
codes. The arithmetic is in `state/codes.py`.
"""
