# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts for PyTorch: dispatch and combine with gradients, and a layer that uses them. See docs/pytorch-moe.md."""
from .. import distributed as _distributed  # registers the backend "moeccl" even if the package is not installed
from ._group import abort, close, comm_of
from ._memory import empty_cache
from .aux_loss import set_aux_loss_scale
from .clip import clip_grad_norm_
from .expert_parallel import ExpertParallel, Handle
from .experts import MLP, Experts, expert_parameters, ignore_experts
from .layer import MoELayer, Router, rebalance
from ._renew import renew
from .scaler import GradScaler
from .tensor_parallel import TensorDispatched, tensor_dispatch
from .whole import full_state_dict, load_full_state_dict
from .whole_optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict

__all__ = ["ExpertParallel", "Experts", "GradScaler", "Handle", "MLP", "MoELayer", "Router", "TensorDispatched", "abort", "clip_grad_norm_", "close",
           "comm_of", "empty_cache", "expert_parameters", "full_optimizer_state_dict", "full_state_dict", "ignore_experts",
           "load_full_optimizer_state_dict", "load_full_state_dict", "rebalance", "renew", "set_aux_loss_scale", "tensor_dispatch"]
