// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "kernels/host/element.h"

namespace moeccl::kernels {
namespace {

template <int kType = 0>
Scalar load(const void* element, moecclDataType_t type) {
  Scalar s{};
  if constexpr (kType < MOECCL_NUM_DATA_TYPES) {
    if (type != kType) return load<kType + 1>(element, type);
    const auto value = load_at<ElementOf<kType>>(element, 0);
    if constexpr (std::is_same_v<decltype(value), const float>) {
      s.f32 = value;
    } else if constexpr (std::is_same_v<decltype(value), const double>) {
      s.f64 = value;
    } else {
      s.i64 = static_cast<int64_t>(value);
    }
  }
  return s;
}

}  // namespace

Scalar scalar_from(const void* element, moecclDataType_t type) { return load(element, type); }

}  // namespace moeccl::kernels
