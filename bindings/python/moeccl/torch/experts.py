# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank: any module, with its parameters stacked over the experts."""
import functools
from typing import Any, Callable, List, Optional, Sequence, TypeVar

import torch
from torch import nn
from torch.func import functional_call

from ._calls import uncompiled
from ._traced import tracing
from .wrapped import distributed_as

_Module = TypeVar("_Module", bound=nn.Module)
ACTIVATIONS = {"gelu": nn.functional.gelu, "relu": nn.functional.relu, "silu": nn.functional.silu}


class MLP(nn.Module):
    """Two linear layers, or with activation "swiglu" three: (silu(x W) * (x V)) U."""

    def __init__(self, hidden: int, ffn: int, activation: str = "gelu", bias: bool = False, device: Any = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        if activation not in (*ACTIVATIONS, "swiglu"):
            raise ValueError(f"activation is {activation!r}: give one of {', '.join(ACTIVATIONS)} or swiglu")
        self.activation = activation
        kind = {"bias": bias, "device": device, "dtype": dtype}
        self.up = nn.Linear(hidden, 2 * ffn if activation == "swiglu" else ffn, **kind)
        self.down = nn.Linear(ffn, hidden, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            return self.down(nn.functional.silu(gate) * x)
        return self.down(ACTIVATIONS[self.activation](x))


def named(numbers):
    """Returns experts' numbers for a person: "experts 0-3, 7"."""
    runs = []
    for e in numbers:
        if runs and e == runs[-1][1] + 1:
            runs[-1][1] = e
        else:
            runs.append([e, e])
    return "experts " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) if runs else "no experts"


def _generators():
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def seeded(make, seed):
    """Returns make() with torch's generators seeded by `seed`; afterwards they are as before. torch.manual_seed() would also seed the
    devices of a process that uses them later."""
    generators = _generators()
    states = [g.get_state() for g in generators]
    try:
        for g in generators:
            g.manual_seed(seed)
        made = make()
    finally:
        for g, state in zip(generators, states):
            g.set_state(state)
    if len(_generators()) > len(generators):  # make() was the first to use CUDA, whose generators were not seeded
        return seeded(make, seed)
    return made


def _made_on(device, make):
    """Returns make() on a device, even if make() names the device meta."""
    with torch.device(device):
        module = make()
    if not any(p.is_meta for p in module.parameters()):
        return module
    module.to_empty(device=device)

    def reset(m):
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
        elif any(True for _ in m.parameters(recurse=False)):
            raise ValueError(f"the expert's {type(m).__name__} is made on the device meta and has no reset_parameters(): give it one, or let "
                             "expert= make it on the default device")

    return module.apply(reset)  # children first, as they are constructed


_call_for_few = uncompiled(functional_call)  # torch.compile would make separate programs for no row and for one


class Experts(nn.Module):
    """The experts in this rank's slots. Each parameter of `make()` is one tensor [slots, ...], with "__" for "." in its name.

    Expert e is made with the seed `seed` + e, so that it is the same expert wherever it is placed. DDP and FSDP must ignore the
    parameters (ignore_experts, expert_parameters).

    The numbers of the experts are part of state_dict(), because every rank has other experts under the same keys: load_state_dict()
    refuses another rank's. placed: an object whose numbers() returns the experts that are in the slots now, if they change."""

    def __init__(self, make: Callable[[], nn.Module], numbers: Sequence[int], seed: int, placed: Any = None) -> None:
        super().__init__()
        modules = [seeded(make, seed + number) for number in numbers or [0]]  # a rank without experts still needs to know their shapes
        if any(True for _ in modules[0].buffers()):
            raise ValueError("the expert module has buffers: an expert is its parameters alone")
        self._first = lambda number, device: seeded(lambda: _made_on(device, make), seed + number)  # copies of the module share it
        self._names, self.n_slots = {}, len(numbers)
        self._numbers, self._placed = list(numbers), placed
        for name, first in modules[0].named_parameters():
            stacked = torch.stack([dict(m.named_parameters())[name].detach() for m in modules[:len(numbers)]]) if numbers \
                else first.detach().new_empty((0, *first.shape))
            mine = name.replace(".", "__")
            self._names[name] = mine
            self.register_parameter(mine, nn.Parameter(stacked, requires_grad=first.requires_grad))
        # The tuple keeps it from being a submodule: its own parameters are never used.
        self._form = (modules[0].to("meta").train(self.training),)

    def __setattr__(self, name, value):
        """fully_shard() sets the parts of parameters in this way."""
        placed = self.__dict__.get("_placed")
        if placed is not None and isinstance(value, nn.Parameter):
            placed.check(value)
        super().__setattr__(name, value)

    def train(self: _Module, mode: bool = True) -> _Module:
        self._form[0].train(mode)  # here, because a graph of torch.compile cannot have a forward pass that changes modules
        return super().train(mode)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Gives the experts their first values again, those of the experts that are in the slots now: torch's deferred initialisation calls
        it for a model that was made on the device meta, after to_empty(). Collective for experts that fully_shard has cut into parts."""
        device = self.stacked()[0].device
        if device.type == "meta":
            raise RuntimeError("the experts are on the device meta, which has no memory: call to_empty(device=...) before reset_parameters()")
        made = [dict(self._first(number, device).named_parameters()) for number in self.numbers()]
        for name, mine in self._names.items():
            parameter = getattr(self, mine)
            if made:
                parameter.copy_(distributed_as(parameter, torch.stack([values[name] for values in made])))

    def numbers(self) -> List[int]:
        """Returns the number of the expert in each slot."""
        return self._numbers if self._placed is None else self._placed.numbers()

    def get_extra_state(self):
        return torch.tensor(self.numbers(), dtype=torch.int64, device="cpu")

    def set_extra_state(self, state):
        given, mine = [int(e) for e in state], self.numbers()
        if given != mine:
            raise ValueError(f"the checkpoint holds {named(given)}, this rank has {named(mine)}: load what this rank saved, after the layer's "
                             "placement, or use moeccl.torch.full_state_dict() and load_full_state_dict()")

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        numbers = state_dict.get(prefix + "_extra_state")
        if numbers is not None:
            self.set_extra_state(numbers)  # before any parameter changes
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def stacked(self) -> List[nn.Parameter]:
        """Returns the parameters [slots, ...] in the order of the expert module's. What torch.nn.utils.parametrize computes for one is not
        among parameters(), which has what it is computed from."""
        return [getattr(self, mine) for mine in self._names.values()]

    def forward(self, rows: torch.Tensor, rows_per_expert: List[int], weights: Any = None, in_place: bool = False,
                open_sizes: bool = True) -> torch.Tensor:
        """Returns the experts' results for rows[R, hidden] and rows_per_expert[slots]; `weights`, if given, returns what
        replaces stacked(). in_place: experts may change `rows`, which nothing else reads. open_sizes: where torch.compile traces the call,
        dispatch is in the same graph, which leaves rows_per_expert open.

        An expert without rows runs too, on an empty input, so that its parameters have gradients on every rank."""
        return (self._traced if open_sizes and tracing() else self._untraced)(rows, rows_per_expert, weights, in_place)

    def _traced(self, rows, rows_per_expert, weights, in_place):
        """For a graph of torch.compile, to which it does not matter who reads the rows. It has each expert's operations."""
        weights = self.stacked() if weights is None else weights()
        if not rows_per_expert:
            return rows + sum(w.sum() for w in weights).to(rows.dtype)
        stacked = [w.unbind(0) for w in weights]
        parts = enumerate(torch.split_with_sizes(rows, rows_per_expert))
        return torch.cat([functional_call(self._form[0], {name: w[i] for name, w in zip(self._names, stacked)}, (part,)) for i, part in parts])

    @functools.partial(uncompiled, recursive=False)  # each expert is compiled by itself: the numbers of rows differ in each step
    def _untraced(self, rows, rows_per_expert, weights, in_place):
        weights = self.stacked() if weights is None else weights()
        if not rows_per_expert:
            return rows + sum(w.sum() for w in weights).to(rows.dtype)  # no experts: the backward pass of weights() is collective
        weights = [w.unbind(0) for w in weights]
        done = []
        split = torch.unsafe_split_with_sizes if in_place else torch.split_with_sizes  # which torch lets nobody change
        for i, part in enumerate(split(rows, rows_per_expert)):
            run = functional_call if part.shape[0] > 1 else _call_for_few
            done.append(run(self._form[0], {name: w[i] for name, w in zip(self._names, weights)}, (part,)))
        return torch.cat(done)


def check_plain(experts, what):
    """Refuses experts with parameters that have no row for each slot by definition, such as low-rank differences."""
    added = sorted(set(dict(experts.named_parameters())) - set(experts._names.values()))
    if added:
        raise ValueError(f"{what} knows the experts by the parameters of the expert module, and they have {', '.join(added)} besides: call "
                         "torch.nn.utils.parametrize.remove_parametrizations() first, or save and load each rank's state_dict()")


def expert_parameters(module: nn.Module) -> List[nn.Parameter]:
    """Returns the parameters of all experts in `module`, which belong to only this rank. For FSDP2: fully_shard(model,
    ignored_params=set(expert_parameters(model)))."""
    return [p for m in module.modules() if isinstance(m, Experts) for p in m.parameters()]


def ignore_experts(module: _Module) -> _Module:
    """Makes DistributedDataParallel ignore the experts of `module` and returns the module: DDP(ignore_experts(model))."""
    names = [f"{path}.{name}" if path else name for path, m in module.named_modules() if isinstance(m, Experts)
             for name, _ in m.named_parameters()]
    # DistributedDataParallel goes by both kinds of names, of which a module such as checkpoint_wrapper's may change one.
    experts = {id(p) for p in expert_parameters(module)}
    names += [name for name, p in module.named_parameters() if id(p) in experts]
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    module._ddp_params_and_buffers_to_ignore = list(dict.fromkeys([*known, *names]))
    return module
