"""How the loops over blocks are run: stacks, threads, background, costs."""
