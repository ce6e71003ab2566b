// SPDX-License-Identifier: Apache-2.0
// The emulated driver's streams and hardware channels.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <thread>
#include <utility>

#include "tests/support/cuda_emulation/cuda_emulation.h"
#include "tests/support/cuda_emulation/stream.h"

namespace moeccl::emulation::driver {

size_t Channel::free_order() const {
  const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  return static_cast<size_t>(std::min_element(orders.begin(), orders.end(), shorter) - orders.begin());
}

std::shared_ptr<Channel> Channels::take(int priority) {
  const std::lock_guard lock(mutex);
  if (pool != nullptr) return pool;
  const auto p = static_cast<size_t>(-std::clamp(priority, 1 - kPriorities, 0));
  auto& all = of_priority[p];
  if (all.size() < n) all.push_back(std::make_shared<Channel>());
  return all[taken[p]++ % n];
}

Room& Room::of(int device) {
  static auto* const all = new std::array<Room, kMostDevices>;
  return (*all)[static_cast<size_t>(device)];
}

void Room::take(uint32_t registers, const Context& context) {
  std::unique_lock lock(mutex_);
  // A context that fails wakes no waiter, so look again now and then.
  while (free_ < registers && context.failed == 0) changed_.wait_for(lock, std::chrono::milliseconds(20));
  free_ -= std::min(free_, registers);
}

void Room::give_back(uint32_t registers) {
  {
    const std::lock_guard lock(mutex_);
    free_ = std::min(kAll, free_ + registers);
  }
  changed_.notify_all();
}

Handles<Stream>& streams() {
  static auto* const all = new Handles<Stream>;
  return *all;
}

std::shared_ptr<Stream> Stream::make(Context* context, unsigned flags, int priority, Kind kind) {
  std::shared_ptr<Stream> s(new Stream(context, flags, priority, kind));
  s->channel_ = context->channels->take(priority);
  std::thread([s] { s->loop(); }).detach();
  const std::lock_guard lock(context->mutex);
  context->streams.push_back(s);
  return s;
}

uint64_t Stream::enqueue(Item item) {
  const std::lock_guard lock(channel_->mutex);
  queue_.push_back(std::move(item));
  if (n_in_order_++ == 0) order_ = channel_->free_order();
  auto& order = channel_->orders[order_];
  order.push_back(this);
  if (order.front() == this) work_.notify_one();
  return ++put_;
}

void Stream::wait_for(uint64_t number) {
  std::unique_lock lock(channel_->mutex);
  done_.wait(lock, [&] { return run_ >= number; });
}

uint64_t Stream::submitted() {
  const std::lock_guard lock(channel_->mutex);
  return put_;
}

bool Stream::idle() {
  const std::lock_guard lock(channel_->mutex);
  return run_ == put_;
}

size_t Stream::n_queued() {
  const std::lock_guard lock(channel_->mutex);
  return queue_.size();
}

void Stream::end() {
  {
    const std::lock_guard lock(channel_->mutex);
    ending_ = true;
  }
  work_.notify_one();
}

// Call it under the channel's lock.
void Stream::leave_head() {
  auto& order = channel_->orders[order_];
  order.pop_front();
  --n_in_order_;
  if (!order.empty()) order.front()->work_.notify_one();
}

void Stream::run(const Item& item) {
  if (context->failed == 0 && (item.context == nullptr || item.context->failed == 0)) item.run();
}

void Stream::loop() {
  const char* delay = std::getenv("MOECCL_TEST_CUDA_DELAY_US");
  const char* only = std::getenv("MOECCL_TEST_CUDA_DELAY_DEVICE");
  const bool late = delay != nullptr && (only == nullptr || std::atoi(only) == context->device);
  const long delay_us = late ? std::atol(delay) : 0;
  std::unique_lock lock(channel_->mutex);
  while (true) {
    const auto at_head = [&] { return n_in_order_ > 0 && channel_->orders[order_].front() == this; };
    work_.wait(lock, [&] { return at_head() || (ending_ && queue_.empty()); });
    if (!at_head()) return;
    Item item = std::move(queue_.front());
    queue_.pop_front();
    const bool stays = item.kind == Item::kWait || item.room > 0;
    if (!stays) leave_head();
    busy_ = true;
    lock.unlock();
    if (delay_us > 0) usleep(static_cast<useconds_t>(delay_us));
    if (item.room > 0) Room::of(context->device).take(item.room, *context);
    if (item.room > 0) {
      lock.lock();
      leave_head();
      lock.unlock();
    }
    run(item);
    if (item.room > 0) Room::of(context->device).give_back(item.room);
    item.run = nullptr;  // release what it holds before others learn that it is done
    lock.lock();
    busy_ = false;
    if (item.kind == Item::kWait) leave_head();
    ++run_;
    done_.notify_all();
  }
}

namespace {

// Work on the stream still runs.
void forget(const std::shared_ptr<Stream>& stream) {
  {
    const std::lock_guard lock(stream->context->mutex);
    auto& all = stream->context->streams;
    all.erase(std::remove(all.begin(), all.end(), stream), all.end());
  }
  stream->end();
}

// Returns the current context's default stream for work without a stream.
std::shared_ptr<Stream> legacy_stream(Context* context) {
  {
    const std::lock_guard lock(context->mutex);
    if (context->legacy != nullptr) return context->legacy;
  }
  static auto* const making = new std::mutex;
  const std::lock_guard lock(*making);
  if (context->legacy != nullptr) return context->legacy;
  std::shared_ptr<Stream> made = Stream::make(context, 0, 0, Stream::Kind::kLegacy);
  const std::lock_guard set(context->mutex);
  return context->legacy = std::move(made);
}

struct OwnStreams {
  std::map<std::pair<Context*, int>, std::shared_ptr<Stream>> of;  // by a context and how often it was reset
  ~OwnStreams() {
    for (const auto& [home, stream] : of) forget(stream);
  }
};
std::shared_ptr<Stream> per_thread_stream(Context* context) {
  static thread_local OwnStreams own;
  std::shared_ptr<Stream>& s = own.of[{context, context->resets}];
  if (s == nullptr) s = Stream::make(context, 0, 0, Stream::Kind::kPerThread);
  return s;
}

// Makes `stream` wait for all work that is on `other` now.
void order_after(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Stream>& other) {
  if (other->idle()) return;
  Item wait;
  wait.kind = Item::kWait;
  wait.run = [other, number = other->submitted()] { other->wait_for(number); };
  stream->enqueue(std::move(wait));
}

}  // namespace

std::shared_ptr<Stream> stream_of(void* handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number > 2) return streams().find(handle);
  Context* const context = current_context();
  if (context == nullptr) return nullptr;
  return number == 2 ? per_thread_stream(context) : legacy_stream(context);
}

Context* context_of(const Stream& stream) { return stream.context; }

int put(const std::shared_ptr<Stream>& stream, Item item) {
  if (stream == nullptr) return current_context() == nullptr ? kInvalidContext : kInvalidHandle;
  if (item.context == nullptr) item.context = stream->context;
  bool captured = false;
  if (const int rc = capture_item(stream, item, &captured); rc != kOk || captured) return rc;
  if (stream->kind == Stream::Kind::kLegacy) {
    for (const auto& other : stream->context->all_streams())
      if (other->blocking()) order_after(stream, other);
  } else if (stream->blocking()) {
    std::shared_ptr<Stream> legacy;
    {
      const std::lock_guard lock(stream->context->mutex);
      legacy = stream->context->legacy;
    }
    if (legacy != nullptr) order_after(stream, legacy);
  }
  stream->enqueue(std::move(item));
  return kOk;
}

int put(void* stream, std::function<void()> run) {
  Item item;
  item.run = std::move(run);
  return put(stream_of(stream), std::move(item));
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  MOECCL_IN_CONTEXT(context);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = 1 - Channels::kPriorities;
  return kOk;
}
namespace {

// On an H200, a call that makes a stream may not return while nearly all channels of the pool have streams that wait,
// and no other call of the context returns before it.
void wait_for_channels(Context& context) {
  const std::shared_ptr<Channel> pool = context.channels->pool;
  if (pool == nullptr || pool->orders.size() < 2) return;
  const std::lock_guard busy(context.busy);
  const auto full = [&] {
    const std::lock_guard lock(pool->mutex);
    return std::count_if(pool->orders.begin(), pool->orders.end(), [](const auto& o) { return o.empty(); }) < 2;
  };
  while (full() && context.failed == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

EXPORT int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  MOECCL_IN_CONTEXT(context);
  if (flags > 1) return kInvalidValue;
  wait_for_channels(*context);
  priority = std::clamp(priority, 1 - Channels::kPriorities, 0);
  *stream = streams().add(Stream::make(context, flags, priority, Stream::Kind::kMade));
  return kOk;
}
EXPORT int cuStreamCreate(void** stream, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  if (flags > 1) return kInvalidValue;
  wait_for_channels(*context);
  *stream = streams().add(Stream::make(context, flags, 0, Stream::Kind::kMade));
  return kOk;
}
EXPORT int cuStreamDestroy_v2(void* stream) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Stream> s = streams().remove(stream);
  if (s == nullptr) return kInvalidHandle;
  refuse_destroyed(s);
  return forget(s), kOk;
}
EXPORT int cuStreamGetCtx(void* stream, void** context) {
  MOECCL_CALL();
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return reinterpret_cast<uintptr_t>(stream) <= 2 ? kInvalidContext : kInvalidHandle;
  return *context = s->context, kOk;
}
EXPORT int cuStreamGetFlags(void* stream, unsigned* flags) {
  MOECCL_CALL();
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  return *flags = s->flags, kOk;
}
EXPORT int cuStreamGetPriority(void* stream, int* priority) {
  MOECCL_CALL();
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  return *priority = s->priority, kOk;
}
EXPORT int cuStreamSynchronize(void* stream) {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (const int rc = refuse_captured(s); rc != kOk) return rc;
  MOECCL_UNSAFE();                       // whichever stream it is, as seen on an H100
  if (s->kind == Stream::Kind::kLegacy)  // also waits for the blocking streams that it waits for
    (void)put(s, Item{Item::kWork, nullptr, [] {}});
  s->wait_for(s->submitted());
  return s->context->failed.load();
}
EXPORT int cuStreamQuery(void* stream) {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (const int rc = refuse_captured(s); rc != kOk) return rc;
  if (s->context->failed != 0) return s->context->failed.load();
  bool idle = s->idle();
  if (s->kind == Stream::Kind::kLegacy) {
    for (const auto& other : s->context->all_streams()) idle = idle && (!other->blocking() || other->idle());
  }
  return idle ? kOk : kNotReady;
}
EXPORT int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  MOECCL_IN_CONTEXT(context);
  return put(stream, [=] { function(argument); });
}

// Words that streams store to and wait for.
namespace {
// A stream may store to or wait for a word in page-locked memory or in a device's memory.
enum class Word { kNone, kPinned, kDevice };
Word word_at(uint64_t address, size_t bytes) {
  if (address % bytes != 0) return Word::kNone;
  const std::lock_guard lock(machine().mutex);
  if (is_pinned(address)) return Word::kPinned;
  return find_device(address) != nullptr ? Word::kDevice : Word::kNone;
}
bool word_matches(uint64_t seen, uint64_t value, unsigned how, bool wide) {
  switch (how) {
    case 0:
      return wide ? static_cast<int64_t>(seen - value) >= 0
                  : static_cast<int32_t>(static_cast<uint32_t>(seen) - static_cast<uint32_t>(value)) >= 0;
    case 1:
      return seen == value;
    case 2:
      return (seen & value) != 0;
    default:
      return (~(seen | value) & (wide ? ~uint64_t{0} : 0xffffffffu)) != 0;
  }
}
template <class T>
int write_word(void* stream, uint64_t address, T value, unsigned flags) {
  if (flags > 1 || word_at(address, sizeof(T)) == Word::kNone) return kInvalidValue;  // 1: without a fence
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (!reaches(*s->context, address, sizeof(T))) return kInvalidValue;
  Item item;
  item.run = [=, context = s->context] {
    const Access access(context);
    std::atomic_ref(*reinterpret_cast<T*>(address)).store(value, std::memory_order_release);
  };
  return put(s, std::move(item));
}
template <class T>
int wait_word(void* stream, uint64_t address, T value, unsigned how) {
  constexpr unsigned kConditions = 3;
  const Word word = word_at(address, sizeof(T));
  if (how > kConditions || word == Word::kNone) return kInvalidValue;
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (!reaches(*s->context, address, sizeof(T))) return kInvalidValue;
  Item item;
  item.kind = Item::kWait;
  item.run = [=, context = s->context] {
    std::optional<Access> access;
    if (word == Word::kDevice) access.emplace(context);
    const std::atomic_ref seen(*reinterpret_cast<T*>(address));
    while (!word_matches(seen.load(std::memory_order_acquire), value, how, sizeof(T) == 8) && context->failed == 0)
      usleep(50);
  };
  return put(s, std::move(item));
}
}  // namespace
EXPORT int cuStreamWriteValue64_v2(void* stream, uint64_t address, uint64_t value, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  return write_word<uint64_t>(stream, address, value, flags);
}
EXPORT int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  return write_word<uint32_t>(stream, address, value, flags);
}
EXPORT int cuStreamWaitValue64_v2(void* stream, uint64_t address, uint64_t value, unsigned how) {
  MOECCL_IN_CONTEXT(context);
  return wait_word<uint64_t>(stream, address, value, how);
}
EXPORT int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned how) {
  MOECCL_IN_CONTEXT(context);
  return wait_word<uint32_t>(stream, address, value, how);
}
