// The compiled kernels that this build of the library carries, for the driver to load. None when it was built without
// nvcc.
#pragma once

#include <vector>

namespace moeccl::cuda {

struct Image {
  const char* name;  // the source: "copy", "reduce", ...
  const unsigned char *begin, *end;
};
std::vector<Image> images();

}  // namespace moeccl::cuda
