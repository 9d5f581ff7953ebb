"""Side by side with other libraries, and with what the machine could do.

``python -m nox -s bench`` runs everything; ``python -m benchmarks --quick`` is a minute's
version in the environment that is there.  `docs/benchmarks.md` says how to read the
result.  Nothing here is part of the package: it uses `kfac_core`'s public names.

In reading order: `workloads` (what is computed), `stages` (what is timed, and the
flops that it needs), `libraries` (who computes it), `timing` (one sample), `worker` (one
process a library), `process` and `processes` (its parent's side), `run` (who is asked
what, and when), `agreement` (that all compute the same), `growth` (exponents),
`report` and `plot` (what is shown), `recorded` (what others measured), `limits` (what is
to be reached), `measured`, `result`, `targets` and `call_targets` (whether a run shows
it), `command`.

Conventions.  Rows, vectors and answers are float32.  A layer's vector is a matrix of
shape ``(in(+1), out)``, the bias its last row.  Seconds are seconds, of the processor or
of the wall clock as each is called; a roofline is flops over the best rate of a float32
matrix product that was seen in the same run.
"""
