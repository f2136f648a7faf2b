"""From the arguments of `flashmask_attention` to launches of kernels.

`arguments` checks them, `implementations` picks what serves them, `call` keeps the resolved calls, and `operators` runs
them under a mask's cached tile plan, through torch.library, which `library` registers with.
"""
