"""Matrix optimizers; importing this registers them."""

from torchtitan_dmuon.optim.algorithms.muon import MuonRule
from torchtitan_dmuon.optim.algorithms.normuon import NorMuon
from torchtitan_dmuon.optim.algorithms.shampoo import Shampoo
from torchtitan_dmuon.optim.algorithms.soap import SOAP

__all__ = ["SOAP", "MuonRule", "NorMuon", "Shampoo"]
