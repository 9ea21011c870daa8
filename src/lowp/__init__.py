"""lowp: training neural networks in low precision across many machines."""
