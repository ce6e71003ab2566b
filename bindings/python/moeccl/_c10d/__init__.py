# SPDX-License-Identifier: Apache-2.0
"""What moeccl.distributed is made of: element types and operators, works, point to point, the backend, the group."""
