"""TRL's experimental trainers on packed rows: `flashmask_hf.trainers` does not import them.

Importing `trl.experimental` is slow and warns.
"""
