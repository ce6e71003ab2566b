# SPDX-License-Identifier: Apache-2.0
"""tests/abi/grow.py OUTPUT HEADER...: copies the headers, with one more field in each struct that has a size."""
import os
import re
import sys

output, *headers = sys.argv[1:]
for header in headers:
    with open(header, encoding="utf-8") as text:
        grown = re.sub(r"(typedef struct \{\s*size_t size;[^{}]*)\} (moeccl\w+;)", r"\1  uint64_t grown;\n} \2", text.read())
    with open(os.path.join(output, os.path.basename(header)), "w", encoding="utf-8") as copy:
        copy.write(grown)
