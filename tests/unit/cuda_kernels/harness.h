// SPDX-License-Identifier: Apache-2.0
// Runs a CUDA kernel with a random launch shape, for comparison with the host reference: on the CPU or, where tests/gpu
// builds these tests, through the driver.
#pragma once

#include "kernels/cuda/args.h"
#include "tests/gpu/kernels_on_driver.h"
#include "tests/support/cuda_emulation/cuda_emulation.h"
#include "tests/unit/kernels/kernel_test_util.h"

namespace moeccl::cuda {

using kernels::Buffer;
using kernels::difference;
using kernels::is_float;
using kernels::kTypeNames;
using kernels::kTypeSizes;
using kernels::Random;

// The number of shapes that all files of this program have run, for the final check.
inline int& shapes_run() {
  static int n = 0;
  return n;
}

template <class Args>
void run_kernel(const std::string& name, const Args& args, Random& random, uint32_t blocks = 0) {
  emulation::Launch how;
  how.blocks = blocks > 0 ? blocks : static_cast<uint32_t>(1 + random.below(3));
  how.threads = 32u << random.below(random.chance(20) ? 4 : 2);
  how.seed = random.bits();
#ifdef MOECCL_TEST_ON_DRIVER
  Args given = args;
  __builtin_clear_padding(&given);  // where what is left of other pointers would look like one of the arguments
  on_driver::launch(name, &given, sizeof(given), how.blocks, how.threads);
#else
  const emulation::Kernel* kernel = emulation::find_kernel(name);
  ASSERT_NE(kernel, nullptr) << name;
  ASSERT_EQ(kernel->bytes, sizeof(args)) << name;
  emulation::launch(*kernel, &args, how);
#endif
  ++shapes_run();
}

template <class Args>
void run_typed(const char* name, int type, const Args& args, Random& random, uint32_t blocks = 0) {
  run_kernel(std::string(name) + "_" + std::to_string(type), args, random, blocks);
}

// Returns a random scale of the type.
inline kernels::Scalar random_scale(int type, Random& random) {
  kernels::Scalar s{};
  if (type == moecclFloat64)
    s.f64 = random.normal();
  else if (is_float(type))
    s.f32 = static_cast<float>(random.normal());
  else
    s.u64 = random.bits();
  return s;
}

}  // namespace moeccl::cuda
