"""FlashMask attention as a kernel of the Hub: imports the `flashmask_hf` beside this file, and registers it.

transformers calls what has the names of FlashAttention's kernels: it takes `flash_attn_forward` for the attention
because `supports_flash_attn` is there.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

__all__ = ["flash_attn_forward", "flashmask_hf", "supports_flash_attn"]

_PACKAGE = Path(__file__).parent / "flashmask_hf"


def _load_package() -> None:
    """Import the package of this kernel under its own name, unless this version is imported already.

    Its modules import each other as `flashmask_hf`, its operators have one namespace of torch, and its patches of
    transformers hold for a process, so that two copies cannot live in one.

    Raises:
        ImportError: another version is imported.
    """
    source = (_PACKAGE / "__init__.py").read_text(encoding="utf-8")
    (own,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if "flashmask_hf" in sys.modules:
        other = sys.modules["flashmask_hf"].__version__
        if other != own:
            raise ImportError(
                f"this kernel holds flashmask_hf {own}, but version {other} is imported already; use "
                "attn_implementation='flashmask', which is that version's, or do not import it before the kernel"
            )
        return
    spec = importlib.util.spec_from_file_location("flashmask_hf", _PACKAGE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["flashmask_hf"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["flashmask_hf"]
        raise


_load_package()

import flashmask_hf  # noqa: E402

flashmask_hf.register()  # raises where the import only warns: transformers is not one that the package knows

from flashmask_hf.hf.attention import attention_forward as flash_attn_forward  # noqa: E402

supports_flash_attn = True
