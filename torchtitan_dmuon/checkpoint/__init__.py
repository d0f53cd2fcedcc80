"""Checkpoints over torch.distributed.checkpoint, whose content does not know ranks or owners."""
