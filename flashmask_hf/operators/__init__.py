"""The operators of torch.library under `flashmask_hf::`, through which compilers and dispatch modes see attention.

`library` registers operators; `plan`, `attention`, `decoding` and `sparse/operators.py` define them, around a `Call`.
"""
