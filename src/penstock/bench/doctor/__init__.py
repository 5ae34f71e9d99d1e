"""`penstock doctor`: measures a machine, and computes what it allows a model."""
