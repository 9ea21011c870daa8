"""Training runs: recipes, data, models, the one loop, checkpoints, launching. `lowp train` is the way in.

From Python:

    recipe = read_recipe("aps8", ["epochs=3", "wire.format=e4m3fn"])       # lowp.training.reading
    run(recipe, Path("runs/mine"))                                         # lowp.training.run
"""
