"""Runs the operators' protocol under a virtual clock: what calls cost on a described cluster."""
