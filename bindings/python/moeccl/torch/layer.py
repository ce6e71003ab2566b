# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as a module: router, experts over the ranks of a group, and the papers' features as options."""
import functools
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

import moeccl
from moeccl import _abi
from . import wrapped
from ._agree import wrong_in_groups
from ._calls import FLOATS, uncompiled
from ._group import Group, comm_of, group_of, largest, largest_in, revoke
from ._traced import AttachLoss, Finish, Key, refuse_export, tracing
from .aux_loss import attach_loss, set_scaler_scale
from .expert_parallel import ExpertParallel
from .experts import MLP, Experts, seeded
from .functions import Needed
from .in_flight import Arrive
from .moving import move_experts, several
from .placement import Fixed, Hybrid
from .priced import Priced
from .replace import Replacing, follow, replace_combine
from .replicated import Replicated
from .swapped import Swapped


class _Finish(torch.autograd.Function):
    """Returns parameters of the experts as they are; the backward pass finishes their gradients. It is not a hook of each parameter, because
    copy.deepcopy() and load_state_dict(assign=True) make new parameters without hooks."""

    @staticmethod
    def forward(ctx, finish, *weights):
        ctx.finish = finish
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, *ctx.finish(grads)


def _note(error, text):
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(text)


class _Shared:
    """A process group, which a copy of the layer shares: torch cannot copy it."""

    def __init__(self, group):
        self.group = group

    def __deepcopy__(self, memo):
        return self


class _Placed:
    """Which experts are in this rank's slots now, for Experts. A copy of the layer makes it refer to the copy's placement."""

    def __init__(self, placement, slots):
        self._placement, self._slots = placement, slots

    def numbers(self):
        return self._placement.numbers(self._slots)

    def check(self, parameter):
        wrapped.check_parameter(parameter, self._placement.comm)


class Router(nn.Module):
    """Scores of all experts in float32, the top-k of their softmax, and the load-balancing loss of Switch Transformers."""

    def __init__(self, hidden: int, n_experts: int, top_k: int, normalize: bool = True, device: Any = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, n_experts, bias=False, device=device, dtype=dtype)
        self.top_k, self.normalize = top_k, normalize

    def choose(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns the distinct experts [T, top_k] of tokens with probabilities[T, n_experts]. A subclass may choose otherwise."""
        return probabilities.topk(self.top_k, dim=-1).indices

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns weights[T, k], experts[T, k] and the loss: the number of experts times the sum over experts of the share of choices
        times the mean probability."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = torch.softmax(nn.functional.linear(x.float(), self.linear.weight.float()), dim=-1)
        index = self.choose(probabilities)
        weights = probabilities.gather(-1, index)
        if self.normalize and self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        n_experts = probabilities.shape[-1]
        chosen = index.reshape(-1)
        # Not bincount, which waits for the device and whose result torch.compile does not know the size of.
        choices = torch.zeros(n_experts, dtype=torch.int64, device=x.device).scatter_add_(0, chosen, torch.ones_like(chosen))
        share = choices / max(1, index.numel())
        loss = n_experts * (share * (probabilities.sum(0) / max(1, x.shape[0]))).sum()
        return weights, index, loss


class MoELayer(nn.Module):
    """x[..., hidden] -> the same shape: the weighted sum of each token's top-k experts, whatever rank they are on.

        self.ffn = moeccl.torch.MoELayer(hidden=256, n_experts=8, top_k=2, ffn=1024)     # instead of the dense block

    hidden, n_experts, top_k, group, max_tokens, align_rows, algorithm, trials, dispatch_dtype, comm_options: as for ExpertParallel
    ffn:             inner width of the experts, with `activation` "gelu", "relu", "silu" or "swiglu", and with `bias` or without
    expert:          instead of ffn, a function without arguments that makes one expert, a module that takes rows[R, hidden]
    router:          instead of the softmax, a module or function of x[T, hidden] that returns weights[T, k], the distinct experts
                     index[T, k], with -1 for none (a token of only -1, such as padding, gets zeros), and a loss or None
    shared_expert:   a module that every token passes too, or its inner width; each rank has it, like any dense layer
    aux_loss_weight: weight of the load-balancing loss, which joins the backward pass automatically (set_aux_loss_scale);
                     `aux_loss` has its value
    capacity_factor: capacity_factor * top_k * max_tokens / n_experts is the most tokens that one rank sends to one expert, and with
                     replica_slots, times ranks * n_experts / slots, the most that one slot takes from all ranks; None: no limit
    average:         gradients of experts are divided by the number of ranks, as DDP and FSDP do with all others. False: they are not;
                     a number: by that. Where ranks share one batch, as those of tensor or sequence parallelism do, give the number
                     of data-parallel ranks
    compute_dtype:   type of the rows that travel and of the experts' computation, for which the weights are cast; they and their
                     gradients keep their own. None: autocast's type, or else that of x. y has the type of x
    expert_data_group: the group of ranks that hold the same experts, if the job has several expert-parallel groups: gradients
                     of experts are summed over it too
    seed:            expert e is initialized from seed + e; None: from torch's generators, with a number on which the ranks agree

    The papers' features, at most one of the first three:
    swap:            True: rebalance() swaps the two experts whose exchange reduces the tokens' traffic most (HierMoE).
                     It does so where the predicted share of the measured time of the layer's operations, over swap_horizon passes,
                     exceeds the time of a swap. swap_levels: groups of ranks at each level, outermost first, each byte then costs the
                     same at every level; None: the levels of the communicator's topology, with the links of profile or topology
    replica_slots:   slots of each rank, more than its share of experts: popular experts get replicas, and rebalance() computes a
                     new placement (adaptive replication). n_nodes: nodes over which the replicas' traffic is balanced, with as many
                     ranks each; None: the groups of the topology's outermost level. It takes the new placement if that saves more
                     time in swap_horizon passes than moving the experts takes, or if fewer tokens are then dropped for capacity
    domains:         S_ED of each level of the communicator's topology, outermost first: experts travel inside domains, tokens
                     between them (HybridEP). "auto": the sizes of least step time, from max_tokens, the bytes of an expert and the
                     links of topology and profile; `layer.placement.domains` has them. codec_ratio: above 1, experts travel
                     compressed, which changes results. gradient_ratio: above 1, their gradients return compressed, too; what that
                     leaves out stays with this rank for the next step, and belongs to its checkpoint (state_dict() has it)
    sample_tokens:   tokens of a sample: y = x + experts(norm(x)) for the samples that are best placed here (NetMoE), where the layer
                     applies `norm` instead of the caller; plus shared_expert(norm(x)), which then travels with x as a separate row.
                     To make labels follow, call `layer.follow(labels)`. Samples stay where moving them takes longer by the clock, which
                     decides once per training step. Prices alone choose places and plans (trials=-1), so that a forward pass that
                     checkpointing repeats decides as before. On GPUs and with deterministic=1 they also decide whether samples move
    """

    def __init__(self, hidden: int, n_experts: int, top_k: int, ffn: Optional[int] = None, *, group: Group = None,
                 expert: Optional[Callable[[], nn.Module]] = None, activation: str = "gelu", bias: bool = False,
                 shared_expert: Union[nn.Module, int, None] = None, max_tokens: Optional[int] = None, normalize: bool = True,
                 aux_loss_weight: float = 0.01, capacity_factor: Optional[float] = None, align_rows: int = 1, algorithm: Optional[str] = "auto",
                 trials: int = 0, average: Union[bool, float] = True, expert_data_group: Union[torch.distributed.ProcessGroup, DeviceMesh, None] = None,
                 seed: Optional[int] = None, device: Any = None, dtype: Optional[torch.dtype] = None, swap: bool = False,
                 swap_levels: Optional[Sequence[int]] = None, swap_horizon: float = 100, replica_slots: int = 0, n_nodes: Optional[int] = None,
                 domains: Union[Sequence[int], str, None] = None, codec_ratio: float = 1, gradient_ratio: float = 1, sample_tokens: int = 0,
                 norm: Optional[Callable[[torch.Tensor], torch.Tensor]] = None, dispatch_dtype: Optional[torch.dtype] = None,
                 comm_options: Optional[Dict[str, Any]] = None, compute_dtype: Optional[torch.dtype] = None,
                 router: Optional[Callable[[torch.Tensor], Any]] = None) -> None:
        super().__init__()
        if (ffn is None) == (expert is None):
            raise ValueError("give ffn, the inner width of the experts, or expert, which makes one: one of the two")
        for name, value in (("hidden", hidden), ("n_experts", n_experts), ("top_k", top_k), ("ffn", ffn)):
            if (name, value) != ("ffn", None) and (not hasattr(value, "__index__") or value < 1):
                raise ValueError(f"{name} is {value!r}: give a whole number from 1")
        if domains and domains != "auto" and (isinstance(domains, str) or not hasattr(domains, "__len__")):
            raise TypeError(f'domains is {domains!r}: give the size of a domain at each level, such as [2], or "auto"')
        chosen = [name for name, on in (("swap", swap), ("replica_slots", replica_slots), ("domains", domains)) if on]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} say differently where experts are: give one of them")
        for name, ratio in (("codec_ratio", codec_ratio), ("gradient_ratio", gradient_ratio)):
            if ratio != 1 and not domains:
                raise ValueError(f"{name} is {ratio} without domains, in which experts would travel: give domains")
        if sample_tokens and domains:
            raise ValueError("sample_tokens cannot go with domains: experts that travel leave no tokens to place")
        if sample_tokens and dispatch_dtype is not None:
            raise ValueError("sample_tokens cannot go with dispatch_dtype: the dispatched rows are the tokens that may stay")
        if norm is not None and not sample_tokens:
            raise ValueError("norm is for sample_tokens, where the layer adds the residual: apply it before the layer")
        if not isinstance(average, bool) and not (isinstance(average, (int, float)) and average > 0):
            raise ValueError(f"average is {average!r}: give True, False, or the number by which to divide")
        if compute_dtype not in (None, *FLOATS):
            raise ValueError(f"compute_dtype is {compute_dtype}: give one of {', '.join(map(str, FLOATS))}, or None")
        if router is not None and not callable(router):
            raise TypeError(f"router is a {type(router).__name__}: give a module or a function of x that returns weights, index and loss")
        if capacity_factor is not None and max_tokens is None:
            raise ValueError("capacity_factor counts from max_tokens: give that too")
        expert_data_group = None if expert_data_group is None else group_of(expert_data_group)
        self.hidden, self.n_experts, self.top_k, self.aux_loss_weight = hidden, n_experts, top_k, aux_loss_weight
        self.comm = comm_of(group, **(comm_options or {}))
        kind = {"device": device, "dtype": dtype}
        self.router = Router(hidden, n_experts, top_k, normalize, **kind) if router is None else router
        make = expert or (lambda: MLP(hidden, ffn, activation, bias, **kind))
        if domains == "auto":
            domains = self._step_bytes(make, max_tokens, compute_dtype or dtype)
        self.placement = self._place(swap and (swap_levels, swap_horizon), replica_slots and (replica_slots, n_nodes, swap_horizon), domains,
                                     (codec_ratio, gradient_ratio))
        if domains:
            self.remainders = self.placement.remainders
        capacity = 0 if capacity_factor is None else self.placement.limit(capacity_factor * top_k * max_tokens)
        self.ep = ExpertParallel(self.placement.n_slots, top_k, hidden, self.comm, max_tokens, capacity=capacity,
                                 expert_rank=self.placement.owners(), align_rows=align_rows, algorithm=algorithm,
                                 trials=-1 if sample_tokens else trials,  # see Replacing
                                 dispatch_dtype=dispatch_dtype)
        self.ep._hybrid = self.placement.hybrid
        placed = _Placed(self.placement, self.ep.local_experts)
        self.experts = Experts(make, placed.numbers(), self._agreed(seed, expert_data_group), placed)
        if isinstance(shared_expert, int):
            shared_expert = MLP(hidden, shared_expert, activation, bias, **kind)
        self.shared_expert, self.norm = shared_expert, norm
        own_rows = shared_expert is not None
        self._replacing = Replacing(sample_tokens, _abi.moecclReplaceSolve, 2 if own_rows else 1) if sample_tokens else None
        self._data = None if expert_data_group is None else _Shared(expert_data_group)
        self._compared = False  # whether the ranks of expert_data_group are known to hold the same experts
        self._compute_dtype = compute_dtype
        self.aux_loss, self.handle, self.step, self._index = None, None, None, None
        self._key = Key(self)
        self._divisor = (self.n_ranks if average else None) if isinstance(average, bool) else average  # of the experts' gradients
        self._untraced = self._untraced_option()

    def _untraced_option(self):
        """Returns the option for which torch.compile cannot have the layer in its graph; None: it can."""
        by_placement = {Swapped: "swap", Replicated: "replica_slots", Hybrid: "domains"}
        return by_placement.get(type(self.placement)) or ("sample_tokens" if self._replacing else None)

    def _agreed(self, seed, data_group):
        """Returns the seed or, without one, draws the same on all ranks that may hold an expert."""
        if seed is not None:
            return seed
        # One draw, so that ranks with equal generators keep them equal.
        seed = largest(self.comm, int(torch.randint(0, 2**31, (1,), device="cpu")))
        return seed if data_group is None else largest_in(data_group, seed)

    def _step_bytes(self, make, max_tokens, dtype):
        """Returns the figures that decide about domains here. The gather begins with the layer and gradients return at once, so no
        computation hides either."""
        if max_tokens is None:
            raise ValueError('domains is "auto" without max_tokens, from which the bytes of tokens follow: give max_tokens too')
        expert_bytes = sum(p.numel() * p.element_size() for p in seeded(make, 0).parameters())
        row_bytes = self.hidden * (dtype or torch.get_default_dtype()).itemsize
        return {"top_k": self.top_k, "data_bytes": max_tokens * self.top_k * row_bytes,
                "expert_bytes": expert_bytes * -(-self.n_experts // self.comm.size)}

    def _place(self, swap, replicas, domains, ratios):
        if swap:
            return Swapped(self.n_experts, self.comm, self.top_k, *swap)
        if replicas:
            return Replicated(self.n_experts, self.comm, *replicas)
        if domains:
            return Hybrid(self.n_experts, self.comm, domains, *ratios)
        return Fixed(self.n_experts, self.comm)

    @property
    def data_group(self) -> Optional[torch.distributed.ProcessGroup]:
        """The expert_data_group, or None."""
        return None if self._data is None else self._data.group

    @property
    def n_ranks(self) -> int:
        """The ranks of all expert-parallel groups with the same experts."""
        return self.comm.size * (1 if self._data is None else torch.distributed.get_world_size(self.data_group))

    def _finished(self, finish):
        """Returns the parameters of the experts, those that are trained through finish(*parameters), whose backward pass finishes their
        gradients. With an expert_data_group one call has all of them: its ranks sum them in the order of the parameters, also those that a
        rank has not used, whether torch.compile made the backward pass or not. Without one, each has a call of its own, so that a
        parameter that nothing uses gets no gradient."""
        weights = self.experts.stacked()
        trained = [w for w in weights if w.requires_grad]
        calls = [[w] for w in trained] if self._data is None else [trained]
        finished = iter([w for given in calls if given for w in finish(*given)])
        return [next(finished) if w.requires_grad else w for w in weights]

    def _finish_gradients(self, grads):
        """Finishes gradients inside the backward pass, on all ranks in the same order."""
        grads = [self.placement.reduce(g) for g in grads]
        if self._data is not None:
            grads = self.summed(grads)
        return grads if self._divisor is None else [g / self._divisor for g in grads]

    def summed(self, grads):
        """Returns the sums of gradients over the expert_data_group."""
        if not self._compared:
            wrong = wrong_in_groups(self)
            if wrong:
                raise ValueError(wrong)
            self._compared = True
        sums = [g.clone(memory_format=torch.contiguous_format) for g in grads]
        for one in sums:
            torch.distributed.all_reduce(one, group=self.data_group)
        return sums

    def _types(self, tokens):
        """Returns the type in which rows travel, and the one to which they and the experts' weights are cast; None: they are not."""
        device = tokens.device.type
        autocast = torch.is_autocast_enabled(device)
        kind = self._compute_dtype or tokens.dtype
        if autocast and self._compute_dtype is None and tokens.dtype != torch.float64:  # which autocast does not cast either
            kind = torch.get_autocast_dtype(device)
        travels = kind if self._replacing is None else tokens.dtype  # a sample's rows are also its residual
        # Autocast casts weights where an operation needs it, and an expert of several types casts by itself.
        mixed = len({w.dtype for w in self.experts.stacked() if w.is_floating_point()}) > 1
        return travels, kind if self._compute_dtype or not (autocast or mixed) else None

    def _begin_routing(self):
        wrapped.check(self)
        if torch._C._current_graph_task_id() < 0:  # not a recomputation
            set_scaler_scale(1.0)  # a backward pass that failed has left its own

    @uncompiled
    def _dispatch(self, tokens, slots, weights, beside):
        """Returns rows[R, hidden], the rows of each slot, and None or the Flight that _arrived() waits for. beside: the caller has something
        to compute meanwhile."""
        self._begin_routing()
        self.handle = self.ep.checked_route(tokens, slots, weights)
        self.placement.routed(self._index, self.handle)
        self.handle.n_dropped += self.placement.dropped
        rows, flight = self.ep.begin_send(tokens, self.handle) if beside else (self.ep.send(tokens, self.handle), None)
        return rows, self.handle.rows_per_expert, flight

    @uncompiled
    def _arrived(self, rows, flight):
        return Arrive.apply(rows, flight)

    @uncompiled
    def _weights(self, dtype):
        """Returns the weights of the experts that run here, with what finishes their gradients, in the type `dtype`. Whole numbers, such
        as quantized weights, keep their type."""
        weights = self.placement.weights(self._finished(lambda *given: _Finish.apply(self._finish_gradients, *given)))
        return weights if dtype is None else [w.to(dtype) if w.is_floating_point() else w for w in weights]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_tensor(x):
            raise TypeError(f"x is a {type(x).__name__}: give a tensor [..., {self.hidden}]")
        if wrapped.is_distributed(x):
            raise TypeError("x is a DTensor: give the tokens of this rank, x.to_local()")
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}: give [..., {self.hidden}]")
        refuse_export()
        tokens = self._needed(x.reshape(-1, self.hidden))
        if tracing():
            if self._untraced is None:
                return self._traced(tokens).view(x.shape)
            torch._dynamo.graph_break(f"a MoELayer with {self._untraced} cannot be traced: call torch.compile without fullgraph=True, or make "
                                      "the layer without that option")
        self.placement.passed(self)
        self.handle = self.step = None  # frees their memory for this step, unless a backward pass still needs it
        try:
            return self._run(tokens).view(x.shape)
        except BaseException as error:
            self._failed(error)
            raise

    def _needed(self, tokens):
        """Returns tokens that need a gradient if anything of the layer trains, as it does on all ranks or on none. Those of other ranks may,
        where this rank has none and makes its batch itself, or gets them from layers that do not train. So all ranks have the same graph."""
        if tokens.requires_grad or not torch.is_grad_enabled() or not any(p.requires_grad for p in self.parameters()):
            return tokens
        return Needed.apply(tokens, self._key.anchor)

    @uncompiled
    def _failed(self, error):
        """Ends what the other ranks wait for, if this one leaves the forward pass. Before its routing, a ValueError or TypeError is for an
        argument that all ranks give. Of the library's own failures it tells the others."""
        if isinstance(error, getattr(torch.utils.checkpoint, "_StopRecomputationError", ())):
            # A recomputation has all it needs, which may be before combine, where a step decides.
            if self.step is not None:
                self.step.decide()
                self.step.ran()
            return
        of_all = (moeccl.Error, ValueError, TypeError) if self.handle is None else moeccl.Error
        self.handle = self.step = None
        if isinstance(error, moeccl.Error) and error.code == _abi.moecclAborted:
            _note(error, "The error of the rank that is named says why. moeccl.torch.renew(model) on all ranks lets them go on.")
        if isinstance(error, of_all) or self.comm.size == 1:
            return
        try:
            revoke(self.comm)
        except moeccl.Error:  # there is nothing left to end
            return
        _note(error, "The MoE layers' communicator was revoked, so that the other ranks do not wait: moeccl.torch.renew(model) on all ranks "
                     "lets them go on.")

    def _run(self, tokens):
        """Returns the results for tokens[T, hidden]."""
        self.placement.begin(self.experts)
        seen = tokens if self.norm is None else self.norm(tokens)
        weights, index, loss = self.router(seen)
        self._index = index.detach()
        slots = self.placement.slots(index)
        travels, cast_to = self._types(tokens)
        # The row that travels to the new home is the dispatched one or, with a shared expert, a separate row.
        norm_after = self.norm is not None and self.shared_expert is None
        # The residual joins the experts' rows in combine, so a norm that returns another type, as with autocast, decides nothing.
        # torch.compile would end one more graph to wait for the rows. Times by which a placement is priced would include competition
        # for the cores.
        beside = (self.shared_expert is not None and self._replacing is None and not isinstance(self.placement, Priced)
                  and not torch.compiler.is_dynamo_compiling())
        rows, counts, flight = self._dispatch((tokens if norm_after else seen).to(travels), slots, weights, beside)
        self.step = self._replacing.begin(self.handle, tokens) if self._replacing else None
        shared = self.shared_expert(seen) if self.shared_expert is not None else None
        rows = rows if flight is None else self._arrived(rows, flight)
        given = self.norm(rows) if norm_after else rows
        # A sample's rows are also its residual.
        out = self.experts(given if cast_to is None else given.to(cast_to), counts, functools.partial(self._weights, cast_to),
                           in_place=self.step is None, open_sizes=False)
        out = out.to(rows.dtype)
        if self.step is not None:
            home = tokens if shared is None else tokens + shared.to(tokens.dtype)
            y = replace_combine(out, rows, home, self.handle.weights, self.step)
        else:
            y = self.ep.combine(out, self.handle).to(tokens.dtype)
            y = y if shared is None else y + shared.to(tokens.dtype)
        self.aux_loss = None if loss is None else loss.detach()
        if loss is not None and self.aux_loss_weight and torch.is_grad_enabled():
            y = attach_loss(y, self.aux_loss_weight * loss)
        return y

    def _traced(self, tokens):
        """_run() for a graph of torch.compile. What needs the layer when the graph runs is in traced_route()."""
        weights, index, loss = self.router(tokens)
        travels, cast_to = self._types(tokens)
        given, handle = self.ep.traced_dispatch(tokens.to(travels), index, weights, self._key, loss)
        shared = self.shared_expert(tokens) if self.shared_expert is not None else None
        out = self.experts(given if cast_to is None else given.to(cast_to), handle.rows_per_expert, lambda: self._traced_weights(cast_to))
        y = self.ep.combine(out.to(travels), handle).to(tokens.dtype)
        y = y if shared is None else y + shared.to(tokens.dtype)
        if loss is not None and self.aux_loss_weight and torch.is_grad_enabled():
            y = AttachLoss.apply(y, self.aux_loss_weight * loss)
        return y

    def _traced_weights(self, dtype):
        summed = self._data is not None
        if summed or self._divisor is not None:
            weights = self._finished(lambda *given: Finish.apply(self._key.tensor, self._divisor, summed, *given))
        else:
            weights = self.experts.stacked()
        return weights if dtype is None else [w.to(dtype) if w.is_floating_point() else w for w in weights]

    def traced_route(self, index, weights, dtype, loss):
        """Routes for dispatch in a graph, as ExpertParallel.traced_route() does, and takes what the layer shows of a step."""
        self._begin_routing()
        self.handle = None
        self.handle, kind = self.ep.traced_route(index, weights, dtype)
        # Copies, because a graph may put other values into the memory of its own.
        self._index, self.aux_loss = index.clone(), None if loss is None else loss.clone()
        return self.handle, kind

    @torch.no_grad()
    def expert_counts(self) -> torch.Tensor:
        """Returns how many tokens of all ranks chose each expert in the last forward pass, [n_experts] by the experts' numbers, before
        capacity drops any. The call is collective."""
        if self._index is None:
            raise RuntimeError("expert_counts() is for after a forward pass")
        index = self._index.detach().reshape(-1)
        counts = torch.bincount(index[index >= 0], minlength=self.n_experts).cpu()
        self.comm.all_reduce(counts)
        return self.over_data_groups(counts).to(index.device)

    def follow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the labels, masks or positions [samples or tokens, ...] of the samples that the last forward pass brought here. The call
        is collective."""
        if self.step is None:
            raise RuntimeError("follow() is for a layer with sample_tokens, after its forward")
        return follow(self.step, tensor)

    def over_data_groups(self, counts):
        """Returns the sum of a CPU tensor over the expert_data_group; without one, the tensor."""
        if self._data is None:
            return counts
        total = self._for_the_data_group(counts)
        torch.distributed.all_reduce(total, group=self.data_group)
        return total.cpu()

    def of_the_first(self, numbers):
        """Returns the CPU tensor of rank 0, in all expert-parallel groups that of the first group's. The call is collective."""
        if self._data is not None:
            first = self._for_the_data_group(numbers)
            torch.distributed.broadcast(first, torch.distributed.get_global_rank(self.data_group, 0), group=self.data_group)
            numbers = first.cpu()
        self.comm.broadcast(numbers)
        return numbers

    def _for_the_data_group(self, tensor):
        return tensor.to(next((p.device for p in self.experts.stacked()), "cpu"), copy=True)  # where the group sums gradients

    def rebalance(self, optimizer: Any = None, also: Any = ()) -> int:
        """rebalance() for this layer alone; a copy in `also` is one of the layer."""
        return rebalance(self, optimizer, also)


def _layers_of(model):
    return [(path, m) for path, m in model.named_modules() if isinstance(m, MoELayer)]


def rebalance(model: nn.Module, optimizer: Any = None, also: Any = ()) -> int:
    """Moves the experts of all MoE layers in `model` to where the tokens of the last steps need them, and returns the number of slots that
    changed. Results stay the same. Call it between steps; it is collective.

    What has a row for each slot moves along: the parameters, their gradients, and the state of the optimizer, or of each of a list.
    also: what the caller keeps besides, or a list of such: a dictionary {parameter: tensor or list of tensors}, as for float32 master
    weights, with their gradients and the optimizer's state for them; or a copy of the model, such as an AveragedModel, whose layers
    follow. Whatever is not given stays with the slot."""
    given = [[m for _, m in _layers_of(a)] if isinstance(a, nn.Module) else a for a in several(also)]
    return move_experts(_layers_of(model), optimizer, given)


def moe_layers(model):
    """Returns the MoE layers in `model`. They know the ranks of their experts, so no expert may be outside of one."""
    layers = [m for _, m in _layers_of(model)]
    known = {id(layer.experts) for layer in layers}
    for path, m in model.named_modules():
        if isinstance(m, Experts) and id(m) not in known:
            raise ValueError(f"{path or 'the model'} has experts outside of a MoELayer, which would know their ranks: put them into one")
    return layers
