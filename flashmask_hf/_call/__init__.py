"""From the arguments of `flashmask_attention` to launches of kernels.

`arguments` checks them, `implementations` picks what serves them, `call` keeps the resolved calls, `operators` runs
them through torch.library, which `library` registers with, and `plan_cache` keeps a mask's tile plan.
"""
