"""Running statistics of rows: sums, each with the weight that belongs to it."""
