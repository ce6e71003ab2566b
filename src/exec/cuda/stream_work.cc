// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/stream_work.h"

#include <algorithm>

#include "src/base/clock.h"
#include "src/driver/thread.h"
#include "src/exec/fabric.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;

namespace {

thread_local StreamWork* current_work = nullptr;

}  // namespace

StreamWork* StreamWork::current() { return current_work; }
StreamWork::Scope::Scope(StreamWork& work) { current_work = &work; }
StreamWork::Scope::~Scope() { current_work = nullptr; }
Status StreamWork::wait_ready(std::span<const Fabric* const> fabrics) const {
  if (!put.ok() || ready == nullptr) return put;
  // The event of a stream without work comes within some microseconds.
  constexpr int64_t kWithoutSleep_ns = 10'000;
  const int64_t began_ns = now_ns();
  int rc = 0;
  while ((rc = cuda::driver()->cuEventQuery(ready)) == cuda::kNotReady) {
    for (const Fabric* f : fabrics) {
      if (f->aborted.load(std::memory_order_relaxed))
        return error(moecclAborted, "the communicator was aborted before its operation began");
      if (f->failed()) return f->failure();
    }
    if (now_ns() - began_ns > kWithoutSleep_ns) driver::sleep_ns(20'000);
  }
  return cuda::check(rc, "the given CUDA stream");
}

Result<std::shared_ptr<const EarlierWork>> EarlierWork::of(cuda::Context context, cuda::Stream stream) {
  const cuda::Current current(context);
  std::shared_ptr<EarlierWork> made(new EarlierWork(context));
  MOECCL_ASSIGN_OR_RETURN(made->end_, cuda::make_event());
  MOECCL_TRY(cuda::check(cuda::driver()->cuEventRecord(made->end(), stream),
                         stream == nullptr ? "the default stream" : "the given CUDA stream"));
  return std::shared_ptr<const EarlierWork>(std::move(made));
}

Status EarlierWork::wait(std::span<const Fabric* const> fabrics) const {
  const cuda::Current current(context_);
  StreamWork now;
  now.ready = end();
  return now.wait_ready(fabrics);
}

void StreamWork::add(StreamEngine* engine) {
  if (std::find(engines.begin(), engines.end(), engine) == engines.end()) engines.push_back(engine);
}

}  // namespace moeccl::exec
