"""Hooks that trainers put on a model: packed rows in its backbone, router logits without padding, a shared prefill."""
