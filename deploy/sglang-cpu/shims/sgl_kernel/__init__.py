"""Stand-in for SGLang's compiled kernel package on machines without CUDA.

The wheel that provides `sgl_kernel` is built for CUDA, and the CPU build of the same package is on no package
index. With SGLANG_USE_CPU_ENGINE=1 SGLang 0.5.23 imports the names below when it starts, whether or not they will
be used: all belong to speculative decoding and to moving KV cache entries, which serving a plain model never does.

Invariants:
- Nothing here computes. A name that is called raises, so no result of SGLang can come from this file; layers,
  attention (`torch_native`) and sampling (`pytorch`) run SGLang's own torch code.
- No operator is registered under torch.ops.sgl_kernel: SGLang takes `convert_weight_packed` there as the sign of
  an AMX build and would then call kernels that do not exist.
"""

from __future__ import annotations

from typing import NoReturn

__version__ = "0.0.0+no.kernels"

_IMPORTED_AT_START = {
    "copy_all_layer_kv_cache_cpu": "KV cache moves",
    "assign_req_to_token_pool_cpu": "KV cache allocation for speculative decoding",
    "rotate_input_ids_cpu": "speculative decoding",
    "fill_accept_out_cache_loc_cpu": "speculative decoding",
    "fill_bonus_tokens_cpu": "speculative decoding",
    "assign_draft_cache_locs_contiguous_cpu": "speculative decoding",
    "assign_extend_cache_locs_cpu": "speculative decoding",
    "build_tree_kernel_efficient_cpu": "speculative decoding",
    "verify_tree_greedy_cpu": "speculative decoding",
}


def _absent(name: str, used_for: str) -> object:
    def absent(*_args: object, **_kwargs: object) -> NoReturn:
        message = f"sgl_kernel.{name} ({used_for}) needs SGLang's compiled kernels, which this install does not have"
        raise NotImplementedError(message)

    absent.__name__ = name
    return absent


globals().update({name: _absent(name, used_for) for name, used_for in _IMPORTED_AT_START.items()})
