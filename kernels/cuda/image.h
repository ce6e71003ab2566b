// SPDX-License-Identifier: Apache-2.0
// The compiled kernels that this build of the library carries for the driver to load. A build without nvcc has none.
#pragma once

#include <vector>

namespace moeccl::cuda {

struct Image {
  const char* name;  // the source: "copy", "reduce", ...
  const unsigned char *begin, *end;
};
std::vector<Image> images();

// The oldest driver that loads them, as cuDriverGetVersion counts (12000: CUDA 12.0, R525; 13000: R580), and the tools
// that made them.
struct ImageOrigin {
  int driver;
  const char* made_by;
};
ImageOrigin image_origin();

}  // namespace moeccl::cuda
