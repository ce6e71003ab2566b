# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile away from this package.

A graph ends before a call on a group, and torch then compiles what the call runs: not C++, as with torch's own groups, but our
functions. It cannot trace them and, since it knows ProcessGroup, takes a Group's attributes for an error that ends the program."""
import inspect
import sys
from types import CodeType, FunctionType
from typing import Any, Iterator

from torch._C._dynamo import eval_frame as _frames


def _skipping() -> Any:
    """Returns the function that excepts a code object; None if this torch has none."""
    if hasattr(_frames, "set_code_exec_strategy"):  # since torch 2.7
        action = _frames._FrameAction
        strategy = _frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        return lambda code: _frames.set_code_exec_strategy(code, strategy)
    return getattr(_frames, "skip_code", None)


def _functions(thing: Any, module: str) -> Iterator[FunctionType]:
    if isinstance(thing, property):
        thing = thing.fget
    if isinstance(thing, (classmethod, staticmethod)):
        thing = thing.__func__
    if isinstance(thing, FunctionType):
        yield inspect.unwrap(thing)
    elif isinstance(thing, type) and thing.__module__ == module:
        for member in vars(thing).values():
            yield from _functions(member, module)


def _skip(skip: Any, code: CodeType) -> None:
    skip(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _skip(skip, inner)


def leave_untraced(*packages: str) -> None:
    """Makes torch.compile run the functions of these modules and packages, as far as they are imported, as they are."""
    skip = _skipping()
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if any(name == package or name.startswith(package + ".") for package in packages):
            for thing in vars(module).values():
                for function in _functions(thing, name):
                    if function.__module__ == name:
                        setattr(function, "_torchdynamo_disable", True)  # a function that is being traced does not go on into it
                        _skip(skip, function.__code__)
