// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_emulation/test_kernels.h"

#include "kernels/cuda/device.cuh"

namespace moeccl::emulation {

MOECCL_KERNEL(emulated_spin, SpinArgs) {
  while (cuda::load_acquire_system(a.word) < a.value) cuda::pause();
}
MOECCL_KERNEL(emulated_spin_together, SpinArgs) {
  while (cuda::load_acquire_system(a.word) < a.value) cuda::pause();
}
MOECCL_KERNEL(emulated_store, StoreArgs) {
  if (cuda::thread_index() == 0) cuda::store_release_system(a.to, a.value);
}

}  // namespace moeccl::emulation
