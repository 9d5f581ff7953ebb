"""The demonstration: a deep autoencoder on the digits that scikit-learn brings along.

``python -m kfac_core demo`` trains one network by SGD with Nesterov momentum, by Adam
and by K-FAC, from the same initial parameters and on the same batches, and reports
what happened.  All arithmetic is written in the Array API standard, and all randomness
is drawn on the host, so that the program does the same on every backend.

In reading order: `autoencoder` (the network, its derivatives), `kfac` (the method, on
the library's public names), `first_order` (what it is compared with), `training` (one
run), `search` (learning rates), `report` and `figure` (what is shown), `command`.
"""
