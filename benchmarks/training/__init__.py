"""How `lowp train` is measured: beside a loop written by hand, and by what it costs to simulate ranks."""
