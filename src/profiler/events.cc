// SPDX-License-Identifier: Apache-2.0
#include "src/profiler/events.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "src/base/clock.h"

namespace moeccl::profiler {
namespace {

// As in NCCL, a plugin that wants an event also gets the events around it.
constexpr int kWithin = abi::kProxyOp | abi::kProxyStep | abi::kKernelCh | abi::kNetPlugin;
constexpr int kWithinCopies = abi::kCeColl | abi::kCeSync | abi::kCeBatch;
constexpr int kForOperation[] = {kWithin | abi::kColl, kWithin | abi::kP2p};  // [is_message]
constexpr int kForCall[] = {kForOperation[0] | kWithinCopies | abi::kCollApi, kForOperation[1] | abi::kP2pApi};
constexpr int kForGroup = kForOperation[0] | kForOperation[1] | abi::kGroup;
constexpr int kForGroupCall = kForCall[0] | kForCall[1] | kForGroup | abi::kGroupApi | abi::kKernelLaunch;

abi::Descriptor descriptor(int type, void* parent) {
  abi::Descriptor d = {};
  d.type = static_cast<uint64_t>(type);
  d.parentObj = parent;
  return d;
}

// Plugins keep the pointers of texts, and NCCL's stay. Those of a layer's plans go with the layer.
const char* lasting(std::string_view text) {
  static std::mutex mutex;
  static auto* const texts = new std::set<std::string, std::less<>>;
  const std::lock_guard lock(mutex);
  auto at = texts->find(text);
  if (at == texts->end()) at = texts->emplace(text).first;
  return at->c_str();
}

}  // namespace

void Events::begin(size_t number, const Call& call) {
  const int wanted = session_->wanted();
  if ((wanted & kForGroupCall) == 0) return;
  Open o{number, call, wanted, unix_ns()};
  abi::Descriptor d = descriptor(abi::kGroupApi, nullptr);
  d.groupApi.groupDepth = 1;
  o.group_call = session_->start(d);
  if ((wanted & kForCall[call.is_message]) != 0) {
    d = descriptor(call.is_message ? abi::kP2pApi : abi::kCollApi, o.group_call);
    if (call.is_message)
      d.p2pApi = {call.func, call.count, call.type, nullptr, false};
    else
      d.collApi = {call.func, call.count, call.type, call.with, nullptr, false};
    o.api = session_->start(d);
  }
  if ((wanted & kForGroup) != 0) {
    d = descriptor(abi::kGroup, nullptr);
    o.group = session_->start(d);
  }
  open_.push_back(o);
}

std::deque<Events::Open>::iterator Events::find(size_t number) {
  const auto at = std::partition_point(open_.begin(), open_.end(), [&](const Open& o) { return o.number < number; });
  return at != open_.end() && at->number == number ? at : open_.end();
}

void Events::chose(size_t number, const char* algorithm) {
  const auto o = find(number);
  // An exchange that began eagerly and continues with a plan is told with its beginning.
  if (o == open_.end() || std::exchange(o->chosen, true)) return;
  if ((o->wanted & kForOperation[o->call.is_message]) == 0) return;
  const Call& c = o->call;
  // One channel: Inspector takes an operation for complete when the kernel's events of all channels have ended.
  abi::Descriptor d = descriptor(c.is_message ? abi::kP2p : abi::kColl, session_->has_calls() ? o->api : o->group);
  if (c.is_message) {
    d.p2p = {c.func, c.output, c.type, c.count, c.with, 1, o->group};
  } else {
    d.coll = {c.sequence, c.func, c.input, c.output, c.count, c.with, c.type, 1, 0, lasting(algorithm), "", o->group};
  }
  o->operation = session_->start(d);
}

void Events::tell_kernel(const Open& o, int64_t took_ns) {
  // The clock may have been set back since the operation began. No time may be later than the news of it, from which
  // plugins learn how the clock of kernels and that of the host differ.
  const int64_t ended_ns = unix_ns();
  const int64_t began_ns = took_ns > 0 ? ended_ns - took_ns : std::min(o.began_ns, ended_ns - 1);
  abi::Descriptor d = descriptor(abi::kKernelCh, o.operation);
  d.kernelCh = {0, static_cast<uint64_t>(began_ns)};
  void* const kernel = session_->start(d);
  abi::KernelChArgs args{static_cast<uint64_t>(ended_ns)};
  session_->record(kernel, abi::kKernelChStop, args);
  session_->stop(kernel);
}

void Events::end(size_t number, int64_t took_ns) {
  const auto at = find(number);
  if (at == open_.end()) return;
  const Open o = *at;
  open_.erase(at);
  if (o.operation != nullptr && (o.wanted & abi::kKernelCh) != 0) tell_kernel(o, took_ns);
  for (void* const event : {o.operation, o.group, o.api, o.group_call}) session_->stop(event);
}

}  // namespace moeccl::profiler
