"""Training runs: recipes, data, models, the one loop, checkpoints, launching. `lowp train` and `lowp.train` are the ways in."""
