"""This project's own kernel for symmetric products: CuTe DSL, for sm_80 and what came after it.

Only tiles on or below the diagonal are computed; each is written twice, the second time
transposed (paper, section 6 and appendix C.3).

`kernel` is the device code, `geometry` its tile sizes, `objects` keeps it compiled on disk,
`launch` makes it a function of torch tensors.
"""

from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80.launch import symmetric_matmul, unavailable

__all__ = ["symmetric_matmul", "unavailable"]
