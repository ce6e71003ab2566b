# SPDX-License-Identifier: Apache-2.0
"""What torch knows of the group that it is making.

It tells the function that makes a backend nothing of the group's other backends, and some versions nothing of the group's device. So
this reads the variables of torch's own function, which is among the callers."""
import sys
from typing import Any, Dict, Optional


class Asked:
    """What the group's caller has asked for. Made inside of the function that makes a backend; `given` is that one's argument."""

    def __init__(self, given: Any) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
            frame = frame.f_back  # type: ignore[assignment]
        self._known: Dict[str, Any] = {} if frame is None else frame.f_locals
        self._outer = getattr(given, "process_group", None)

    @property
    def backends(self) -> Dict[str, str]:
        """The names of the group's backends by device; nothing if another function makes the group."""
        config = self._known.get("backend_config")
        return {} if config is None else config.get_device_backend_map()

    @property
    def alone(self) -> bool:
        """Whether the group has only one backend."""
        if self.backends:
            return len(set(self.backends.values())) == 1
        try:
            return self._outer is not None and self._outer.name() == "custom"
        except RuntimeError:
            return False

    @property
    def device(self) -> Optional[Any]:
        """The device that the group is bound to."""
        return self._known.get("device_id") or getattr(self._outer, "bound_device_id", None)
