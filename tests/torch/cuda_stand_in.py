# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors without CUDA, as strict about devices as torch: they lie in host memory, do not mix with CPU tensors, and are no numpy
arrays. Work on their streams runs at once, and the library's calls on them block. install() puts all of it in torch.cuda's place."""
import contextlib
import ctypes
import functools

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
_FACTORIES = {torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint,
              torch.randn, torch.randperm, torch.tensor, torch.as_tensor, torch.zeros}
# They take tensors of several devices. Indices may lie on the CPU.
_ACROSS = {torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.is_set_to}
_ON_HOSTS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.share_memory_}
_WITHOUT_WORK = {torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size,
                 torch.Tensor.is_contiguous}
_default = torch.device("cpu")
_used = []  # functions that wait for a stream
_held = []  # tensors that the library may use: on a GPU, their memory is not used again before the stream's work has run


def _settle():
    for wait in _used:
        wait()  # its failure is the communicator's
    _held.clear()


def _is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


def _tensors(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from _tensors(part)
    elif isinstance(thing, dict):
        yield from _tensors(tuple(thing.values()))


def _over(thing, kind):
    """Returns the result of a call, with its tensors as tensors of this kind."""
    if isinstance(thing, torch.Tensor):
        return thing if type(thing) is kind or isinstance(thing, torch.nn.Parameter) else thing.as_subclass(kind)
    if isinstance(thing, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in thing):
        return type(thing)([_over(part, kind) for part in thing])
    return thing


def _plainly(function, args, kwargs):
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


class Cuda(torch.Tensor):
    """A tensor on the device."""
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: DEVICE)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function not in _WITHOUT_WORK and getattr(function, "__name__", "") != "__get__":
            _settle()
        if function is torch.Tensor.data_ptr:
            _held.append(args[0])
        if function in _ON_HOSTS:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")
        every = list(_tensors((args, kwargs)))
        indices = list(_tensors(args[1])) if function is torch.Tensor.__setitem__ else []
        if any(isinstance(i, Cuda) and i.dim() for i in indices) and not isinstance(args[0], Cuda):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if indices and isinstance(args[2], torch.Tensor) and args[2].dim() and isinstance(args[2], Cuda) != isinstance(args[0], Cuda):
            raise RuntimeError("Expected all tensors to be on the same device: index_put_ takes no values of another one")
        if function is torch.Tensor.__setitem__ and not isinstance(args[0], Cuda) and isinstance(args[2], torch.Tensor):
            return _plainly(function, args, kwargs)
        if any(isinstance(g, torch.Generator) for g in (*args, *kwargs.values())):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        own, others = [t for t in every if isinstance(t, Cuda)], [t for t in every if not isinstance(t, Cuda)]
        mixed = [t for t in others if t.dim() > 0] or [t for t in others if all(o.dim() == 0 for o in own) and function not in _ACROSS]
        if own and mixed and function not in _ACROSS:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({function.__name__} of "
                               f"{[(type(t).__name__, list(t.shape)) for t in every]})")
        if function is torch.Tensor.__getitem__ and not isinstance(args[0], Cuda) and any(t.dim() for t in own):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        to_host = function is torch.Tensor.cpu
        if function is torch.Tensor.to and isinstance(args[0], Cuda):
            wanted = kwargs.get("device", args[1] if len(args) > 1 and isinstance(args[1], (str, torch.device, torch.Tensor)) else None)
            wanted = wanted.device if isinstance(wanted, torch.Tensor) else wanted
            to_host = wanted is not None and not _is_cuda(wanted)
            if wanted is not None and _is_cuda(wanted):
                args, kwargs = tuple("cpu" if a is wanted else a for a in args), {k: "cpu" if k == "device" else v for k, v in kwargs.items()}
        elif "device" in kwargs:  # new_empty() and the like
            to_host = kwargs["device"] is not None and not _is_cuda(kwargs["device"])
            kwargs["device"] = "cpu"
        result = _plainly(function, args, kwargs)
        if to_host:
            result = result.as_subclass(torch.Tensor)
            return result.clone() if any(result.data_ptr() == t.data_ptr() for t in own) else result
        if not isinstance(args[0] if args else None, Cuda) and function in (torch.Tensor.copy_, torch.Tensor.__getitem__):
            return result.as_subclass(torch.Tensor)
        return _over(result, Cuda)

    def record_stream(self, stream):
        pass

    def __repr__(self, **_):
        return f"<cuda {self.as_subclass(torch.Tensor)!r}>"


class _Device(TorchFunctionMode):
    """Makes tensors on the device when they are asked for there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _FACTORIES:
            device = kwargs.get("device")
            given = args[0] if args and isinstance(args[0], torch.Tensor) else None
            if device is None and function is torch.as_tensor and given is not None:
                return given
            if _is_cuda(device if device is not None else _default):
                generator = kwargs.get("generator")
                if generator is not None:
                    raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
                made = _plainly(function, args, {**kwargs, "device": "cpu"})
                return made.as_subclass(Cuda)
            made = function(*args, **kwargs)
            return made.as_subclass(torch.Tensor) if isinstance(made, Cuda) else made
        if function is torch.Tensor.to and not isinstance(args[0], Cuda):
            wanted = kwargs.get("device", args[1] if len(args) > 1 and isinstance(args[1], (str, torch.device, torch.Tensor)) else None)
            wanted = wanted.device if isinstance(wanted, torch.Tensor) else wanted
            if wanted is not None and _is_cuda(wanted):
                args, kwargs = tuple("cpu" if a is wanted else a for a in args), {k: "cpu" if k == "device" else v for k, v in kwargs.items()}
                kwargs["copy"] = True
                return _plainly(function, args, kwargs).as_subclass(Cuda)
        return function(*args, **kwargs)


class Stream:
    """A host stream of the library stands for it. The next use of a tensor comes after the library's calls on all streams."""

    def __init__(self, device=None):
        self._raw = None

    @property
    def cuda_stream(self):
        if self._raw is None:
            from moeccl._library import lib
            self._raw = ctypes.c_void_p()
            assert lib.moecclStreamCreate(ctypes.byref(self._raw)) == 0
            _used.append(functools.partial(lib.moecclStreamSynchronize, self._raw))
        return self._raw.value

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        _settle()


class Event:
    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True


def _set_default(device):
    global _default
    _default = torch.device(device)


def install():
    current, cuda = [Stream()], torch.cuda

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, on
    cuda.current_stream = lambda device=None: current[-1]
    cuda.default_stream = lambda device=None: current[0]
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.is_initialized = lambda: True
    cuda.is_available = lambda: True  # another function: torch's compiler knows each by itself
    cuda.current_device = lambda: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.init = lambda: None
    cuda.synchronize = lambda device=None: _settle()
    cuda.set_device = lambda device: None
    torch.set_default_device = _set_default
    _Device().__enter__()
