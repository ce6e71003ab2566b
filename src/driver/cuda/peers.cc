// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/peers.h"

namespace moeccl::driver::cuda {

bool joined_by_nvlink(int device, std::span<const Uuid> others, const std::function<bool(size_t i)>& hidden) {
  constexpr int kNativeAtomics = 3;  // CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
  static const auto ask = reinterpret_cast<int (*)(int*, int, int, int)>(driver_symbol("cuDeviceGetP2PAttribute"));
  int n = 0;
  Uuid own{};
  if (ask == nullptr || driver()->cuDeviceGetCount(&n) != 0 || driver()->cuDeviceGetUuid_v2(own.data(), device) != 0)
    return false;
  bool any = false;
  for (size_t i = 0; i < others.size(); ++i) {
    if (others[i] == own) continue;
    any = true;
    const auto is_other = [&](int d) {
      Uuid uuid{};
      return driver()->cuDeviceGetUuid_v2(uuid.data(), d) == 0 && uuid == others[i];
    };
    int d = 0, atomics = 0;
    while (d < n && !is_other(d)) ++d;
    const bool joined = d == n ? hidden(i) : ask(&atomics, kNativeAtomics, device, d) == 0 && atomics != 0;
    if (!joined) return false;
  }
  return any;
}

uint64_t device_bytes(int device) {
  static const auto ask = reinterpret_cast<int (*)(size_t*, int)>(driver_symbol("cuDeviceTotalMem_v2"));
  size_t bytes = 0;
  return ask != nullptr && ask(&bytes, device) == 0 ? bytes : 0;
}

std::string pci_address(Context context) {
  if (context == nullptr) return "";  // before driver_symbol(), which starts CUDA
  static const auto ask = reinterpret_cast<int (*)(char*, int, int)>(driver_symbol("cuDeviceGetPCIBusId"));
  if (ask == nullptr) return "";
  const Current current(context);
  char text[32] = {};
  int device = 0;
  const bool found = driver()->cuCtxGetDevice(&device) == 0 && ask(text, sizeof(text) - 1, device) == 0;
  return found ? text : "";
}

}  // namespace moeccl::driver::cuda
