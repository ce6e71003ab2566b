#!/usr/bin/env python3
"""Puts fatbins into the library: writes images.S (.incbin) and image_list.cc, the table of kernels/cuda/image.h.

  embed.py IMAGES.S IMAGE_LIST.CC [FATBIN...]"""
import hashlib
import os
import sys


def main():
    assembly, table, fatbins = sys.argv[1], sys.argv[2], sys.argv[3:]
    s = ["/* Written by kernels/cuda/embed.py. */"]
    declarations, rows = [], []
    for path in fatbins:
        name = os.path.splitext(os.path.basename(path))[0]
        with open(path, "rb") as image:
            digest = hashlib.sha256(image.read()).hexdigest()
        # The digest makes this file change, and so be assembled anew, whenever the image does.
        s += [f"/* {name} {digest} */", ".section .rodata", ".balign 64",
              f".globl moeccl_cuda_image_{name}", f".hidden moeccl_cuda_image_{name}",
              f"moeccl_cuda_image_{name}:", f'.incbin "{os.path.abspath(path)}"',
              f".globl moeccl_cuda_image_{name}_end", f".hidden moeccl_cuda_image_{name}_end",
              f"moeccl_cuda_image_{name}_end:", ".byte 0"]
        declarations.append(f"extern const unsigned char moeccl_cuda_image_{name}[], moeccl_cuda_image_{name}_end[];")
        rows.append(f'    {{"{name}", moeccl_cuda_image_{name}, moeccl_cuda_image_{name}_end}},')
    s.append('.section .note.GNU-stack,"",%progbits')
    with open(assembly, "w", encoding="utf-8") as out:
        out.write("\n".join(s) + "\n")
    with open(table, "w", encoding="utf-8") as out:
        out.write("// Written by kernels/cuda/embed.py.\n#include \"kernels/cuda/image.h\"\n\nextern \"C\" {\n")
        out.write("\n".join(declarations) + "\n}\n\nnamespace moeccl::cuda {\n\nstd::vector<Image> images() {\n  return {\n")
        out.write("\n".join(rows) + "\n  };\n}\n\n}  // namespace moeccl::cuda\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
