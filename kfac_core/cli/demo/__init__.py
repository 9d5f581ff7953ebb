"""The demonstration: K-FAC, SGD and Adam train a deep autoencoder on digits.

``python -m kfac_core demo`` trains one network by each method, from the same initial
parameters and on the same batches, with the best of a few learning rates.  The
arithmetic is written in the Array API standard and all random numbers are drawn by
NumPy, so every backend computes the same runs.

In reading order: `network` (the autoencoder and its derivatives), `optimizers` (K-FAC
on the public names of the library, and the other two), `command` (runs and options),
`results` (the table and the picture).
"""
