// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/stream_work.h"

#include <algorithm>

#include "src/driver/thread.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;

namespace {

thread_local StreamWork* current_work = nullptr;

}  // namespace

StreamWork* StreamWork::current() { return current_work; }
StreamWork::Scope::Scope(StreamWork& work) { current_work = &work; }
StreamWork::Scope::~Scope() { current_work = nullptr; }
Status StreamWork::wait_ready() const {
  if (!put.ok() || ready == nullptr) return put;
  int rc = 0;
  while ((rc = cuda::driver()->cuEventQuery(ready)) == cuda::kNotReady) driver::sleep_ns(20'000);
  return cuda::check(rc, "the given CUDA stream");
}
void StreamWork::add(StreamEngine* engine) {
  if (std::find(engines.begin(), engines.end(), engine) == engines.end()) engines.push_back(engine);
}

}  // namespace moeccl::exec
