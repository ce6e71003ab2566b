# SPDX-License-Identifier: Apache-2.0
"""The parts of moeccl.distributed: element types and operators, works, point to point, the backend, the group."""
