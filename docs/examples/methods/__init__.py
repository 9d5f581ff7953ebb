"""Ten optimizers, and three controls, on two small networks, with one tuning budget.

    python docs/examples/methods --quick

In reading order: `problem` (what a network is here), `autoencoder` and `classifier` (the
two), `seen` (what one batch shows), `curvature`, `kfac`, `tridiagonal`,
`shampoo`, `soap`, `kl_shampoo`, `adam`, `sgd` (each method: gradient in, direction out),
`step` (how a direction becomes a step), `catalogue` (every method with its grid),
`training` (one run), `search` (the budget), `table`, `report` and `figure` (what comes
out), `command`.  Everything is NumPy, in float64.
"""
