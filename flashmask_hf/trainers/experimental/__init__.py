"""TRL's experimental trainers on packed rows: import their modules, because `flashmask_hf.trainers` does not.

Importing `trl.experimental` is slow and warns.
"""
