// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/streams.h"

namespace moeccl::driver::cuda {

namespace {

constexpr unsigned kNonBlocking = 1;

}  // namespace

void End::operator()(Stream stream) const {
  const Current current(context);
  (void)driver()->cuStreamSynchronize(stream);
  (void)driver()->cuStreamDestroy_v2(stream);
}
void End::operator()(Event event) const {
  const Current current(context);
  (void)driver()->cuEventDestroy_v2(event);
}

Result<EventOwner> make_event() {
  constexpr unsigned kDisableTiming = 2;
  Event event = nullptr;
  MOECCL_TRY(check(driver()->cuEventCreate(&event, kDisableTiming), "a CUDA event"));
  return EventOwner(event, End{current_context()});
}

Result<StreamOwner> make_stream() {
  Stream stream = nullptr;
  MOECCL_TRY(check(driver()->cuStreamCreate(&stream, kNonBlocking), "a CUDA stream"));
  return StreamOwner(stream, End{current_context()});
}

Result<StreamOwner> make_first_stream() {
  int lowest = 0, highest = 0;
  MOECCL_TRY(check(driver()->cuCtxGetStreamPriorityRange(&lowest, &highest), "the streams' priorities"));
  Stream stream = nullptr;
  MOECCL_TRY(check(driver()->cuStreamCreateWithPriority(&stream, kNonBlocking, highest), "a CUDA stream"));
  return StreamOwner(stream, End{current_context()});
}

Status synchronize(Stream stream, const std::string& what) {
  return check(driver()->cuStreamSynchronize(stream), what);
}

Status copy(void* to, const void* from, size_t bytes, Stream stream, const std::string& what) {
  return check(driver()->cuMemcpyAsync(reinterpret_cast<Pointer>(to), reinterpret_cast<Pointer>(from), bytes, stream),
               what);
}

Status fill(void* at, unsigned char value, size_t bytes, Stream stream, const std::string& what) {
  return check(driver()->cuMemsetD8Async(reinterpret_cast<Pointer>(at), value, bytes, stream), what);
}

}  // namespace moeccl::driver::cuda
