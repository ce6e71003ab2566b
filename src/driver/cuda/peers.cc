// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/peers.h"

#include <algorithm>

#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

bool joined_by_nvlink(int device, std::span<const Uuid> others) {
  constexpr int kNativeAtomics = 3;  // CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
  static const auto ask = reinterpret_cast<int (*)(int*, int, int, int)>(driver_symbol("cuDeviceGetP2PAttribute"));
  int n = 0;
  Uuid own{};
  if (ask == nullptr || driver()->cuDeviceGetCount(&n) != 0 || driver()->cuDeviceGetUuid_v2(own.data(), device) != 0)
    return false;
  bool any = false;
  for (const Uuid& other : others) {
    if (other == own) continue;
    any = true;
    const auto joined = [&](int d) {
      Uuid uuid{};
      int atomics = 0;
      return driver()->cuDeviceGetUuid_v2(uuid.data(), d) == 0 && uuid == other &&
             ask(&atomics, kNativeAtomics, device, d) == 0 && atomics != 0;
    };
    bool found = false;
    for (int d = 0; d < n && !found; ++d) found = joined(d);
    if (!found) return false;
  }
  return any;
}

uint64_t device_bytes(int device) {
  static const auto ask = reinterpret_cast<int (*)(size_t*, int)>(driver_symbol("cuDeviceTotalMem_v2"));
  size_t bytes = 0;
  return ask != nullptr && ask(&bytes, device) == 0 ? bytes : 0;
}

}  // namespace moeccl::driver::cuda
