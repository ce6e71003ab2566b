// SPDX-License-Identifier: Apache-2.0
// The emulated driver's events: an event belongs to the context that was current when it was made.
#include "tests/support/cuda_emulation/cuda_emulation.h"
#include "tests/support/cuda_emulation/stream.h"

namespace moeccl::emulation::driver {

Handles<Event>& events() {
  static auto* const all = new Handles<Event>;
  return *all;
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

EXPORT int cuEventCreate(void** event, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  constexpr unsigned kBlocking = 1, kDisableTiming = 2;  // events for other processes are not emulated
  if (flags > (kBlocking | kDisableTiming)) return kInvalidValue;
  auto e = std::make_shared<Event>();
  e->context = context;
  e->timed = (flags & kDisableTiming) == 0;
  *event = events().add(std::move(e));
  return kOk;
}
EXPORT int cuEventDestroy_v2(void* event) {
  MOECCL_IN_CONTEXT(context);
  return events().remove(event) != nullptr ? kOk : kInvalidHandle;
}
constexpr unsigned kExternal = 1;  // in a capture: a node of the graph
static int record_now(const std::shared_ptr<Event>& e, const std::shared_ptr<Stream>& s) {
  uint64_t number = 0;
  {
    const std::lock_guard lock(e->mutex);
    number = ++e->recorded;
  }
  Item item;
  item.run = [e, number] {
    const std::lock_guard lock(e->mutex);
    e->reached = number;
    e->time_ns = moeccl::emulation::now_ns();
    e->changed.notify_all();
  };
  return put(s, std::move(item));
}
static int record(void* event, void* stream, unsigned flags) {
  const std::shared_ptr<Event> e = events().find(event);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (e == nullptr || s == nullptr || e->context != s->context) return kInvalidHandle;
  if (flags > kExternal) return kInvalidValue;
  if ((flags & kExternal) != 0) return capture_external(s, [e](const auto& at) { return record_now(e, at); });
  bool captured = false;
  if (const int rc = capture_record(s, *e, &captured); rc != kOk || captured) return rc;
  return record_now(e, s);
}
EXPORT int cuEventRecord(void* event, void* stream) {
  MOECCL_IN_CONTEXT(context);
  return record(event, stream, 0);
}
EXPORT int cuEventRecordWithFlags(void* event, void* stream, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  return record(event, stream, flags);
}
// Finds the event that the host asks for. Returns kOk, or why the host may not ask.
static int find_for_host(void* event, std::shared_ptr<Event>* found) {
  count_host_wait();
  *found = events().find(event);
  if (*found == nullptr) return kInvalidHandle;
  if (const int rc = refuse_captured(**found); rc != kOk) return rc;
  MOECCL_UNSAFE();
  return kOk;
}
EXPORT int cuEventQuery(void* event) {
  MOECCL_IN_CONTEXT(context);
  std::shared_ptr<Event> e;
  if (const int rc = find_for_host(event, &e); rc != kOk) return rc;
  if (e->context->failed != 0) return e->context->failed.load();
  const std::lock_guard lock(e->mutex);
  return e->reached >= e->recorded ? kOk : kNotReady;
}
EXPORT int cuEventSynchronize(void* event) {
  MOECCL_IN_CONTEXT(context);
  std::shared_ptr<Event> e;
  if (const int rc = find_for_host(event, &e); rc != kOk) return rc;
  std::unique_lock lock(e->mutex);
  const uint64_t number = e->recorded;
  while (e->reached < number && e->context->failed == 0) e->changed.wait_for(lock, std::chrono::milliseconds(20));
  return e->context->failed.load();
}
EXPORT int cuEventElapsedTime(float* milliseconds, void* first, void* second) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Event> a = events().find(first), b = events().find(second);
  if (a == nullptr || b == nullptr || !a->timed || !b->timed) return kInvalidHandle;
  const std::scoped_lock lock(a->mutex, b->mutex);
  if (a->recorded == 0 || b->recorded == 0) return kInvalidHandle;
  if (a->reached < a->recorded || b->reached < b->recorded) return kNotReady;
  *milliseconds = static_cast<float>(static_cast<int64_t>(b->time_ns - a->time_ns)) * 1e-6f;
  return kOk;
}
static int wait_now(const std::shared_ptr<Event>& e, const std::shared_ptr<Stream>& s) {
  uint64_t number = 0;
  {
    const std::lock_guard lock(e->mutex);
    number = e->recorded;
    if (e->reached >= number) return kOk;
  }
  Item item;
  item.kind = Item::kWait;
  item.run = [e, number, own = s->context] {
    std::unique_lock lock(e->mutex);
    while (e->reached < number && own->failed == 0 && e->context->failed == 0)
      e->changed.wait_for(lock, std::chrono::milliseconds(20));
  };
  return put(s, std::move(item));
}
EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Event> e = events().find(event);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (e == nullptr || s == nullptr) return kInvalidHandle;
  if (flags > kExternal) return kInvalidValue;
  // A graph that waits for an event that was never recorded is refused when it is launched. No driver has shown that it
  // bears it, and NCCL records its events when it makes them.
  const auto external = [e](const auto& at) {
    std::unique_lock lock(e->mutex);
    const bool recorded = e->recorded > 0;
    lock.unlock();
    return recorded ? wait_now(e, at) : int{kInvalidValue};
  };
  if ((flags & kExternal) != 0) return capture_external(s, external);
  bool captured = false;
  if (const int rc = capture_wait(s, *e, &captured); rc != kOk || captured) return rc;
  return wait_now(e, s);
}
