"""`dmuon timeline`: where the time of a training step went, from torch.profiler's traces."""
