"""Declares two torchvision operators, so that `import torchvision` works beside a CPU build of torch.

The torchvision wheel on PyPI is compiled against CUDA. Beside a CPU torch its native library cannot be loaded, and the
operators it would register are missing. Then torchvision's own Python files fail at import ("operator torchvision::nms
does not exist"). SGLang imports torchvision through its image code even when it serves text.

Loaded by torchvision_schemas.pth in every interpreter of the environment, because SGLang may start its scheduler
and detokenizer as new ones. It costs nothing until torchvision is imported; then it declares the schemas (no
implementation: serving text never calls them) and steps aside.
"""

from __future__ import annotations

import sys


class _DeclareBeforeTorchvision:
    """An import hook that acts once, just before torchvision's first import, and finds nothing itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        if name != "torchvision":
            return
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        import torch  # noqa: PLC0415 -- importing torch in every interpreter start would cost a second each

        if hasattr(torch.ops.torchvision, "nms"):
            return
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # A Library unregisters what it declared when it is collected.
        torch._torchvision_schemas = library  # type: ignore[attr-defined]  # noqa: SLF001


sys.meta_path.insert(0, _DeclareBeforeTorchvision())  # type: ignore[arg-type]
