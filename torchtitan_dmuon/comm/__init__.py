"""Communication between ranks: the interface, and its implementation over torch.distributed."""

from torchtitan_dmuon.comm.communicator import Communicator, Record, Run, Traffic
from torchtitan_dmuon.comm.streams import CommunicationError, Event

__all__ = ["CommunicationError", "Communicator", "Event", "Record", "Run", "Traffic"]
