#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Embeds fatbins in the library: writes images.S (.incbin) and image_list.cc, the table of kernels/cuda/image.h.

  embed.py [--function NAME] [--origin ORIGIN] IMAGES.S IMAGE_LIST.CC [FATBIN...]

The table's function is moeccl::cuda::images(), or NAME(). ORIGIN, as printed by compile.py --origin, is
for image_origin()."""
import hashlib
import os
import sys


def main():
    arguments, function = sys.argv[1:], "images"
    if arguments[0] == "--function":
        function, arguments = arguments[1], arguments[2:]
    origin = ""
    if arguments[0] == "--origin":
        driver, made_by = arguments[1].split(" ", 1)
        origin = f'ImageOrigin image_origin() {{ return {{{driver}, "{made_by}"}}; }}\n\n'
        arguments = arguments[2:]
    assembly, table, fatbins = arguments[0], arguments[1], arguments[2:]
    s = ["/* Written by kernels/cuda/embed.py. */"]
    declarations, rows = [], []
    for path in fatbins:
        name = os.path.splitext(os.path.basename(path))[0]
        with open(path, "rb") as image:
            digest = hashlib.sha256(image.read()).hexdigest()
        # The digest changes this file, so that it is assembled again whenever the image changes.
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
        out.write("\n".join(declarations) + "\n}\n\nnamespace moeccl::cuda {\n\n"
                  f"std::vector<Image> {function}();\nstd::vector<Image> {function}() {{\n  return {{\n")
        out.write("\n".join(rows) + "\n  };\n}\n\n" + origin + "}  // namespace moeccl::cuda\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
