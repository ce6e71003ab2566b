// SPDX-License-Identifier: Apache-2.0
#include "src/exec/recorder.h"

#include <algorithm>
#include <numeric>

#include "src/base/clock.h"
#include "src/base/data_type.h"
#include "src/base/ticks.h"

namespace moeccl::exec {
namespace {

// NCCL's names. Its interface has none for uint8, and plugins derive sizes from the names that they know.
const char* nccls_name(moecclDataType_t type) {
  static constexpr const char* kNames[] = {"ncclInt8",    "ncclInt8",     "ncclInt32",      "ncclUint32",
                                           "ncclInt64",   "ncclUint64",   "ncclFloat16",    "ncclFloat32",
                                           "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
  static_assert(std::size(kNames) == MOECCL_NUM_DATA_TYPES);
  return kNames[type];
}

// How many elements an operation moves: those of the call, and where ranks or rows differ, what this rank sends or
// roughly moves.
uint64_t elements_of(const Operation& op) {
  if (plan::facts(op.signature.op).private_sizes)
    return std::accumulate(op.send_counts.begin(), op.send_counts.end(), uint64_t{0});
  return op.rows.bytes > 0 ? op.rows.bytes / moecclTypeSize(op.signature.type) : op.signature.count;
}

profiler::Call call_of(uint64_t sequence, const Operation& op) {
  const Signature& s = op.signature;
  const char* const name = s.op == moecclOpAllToAll ? "AlltoAll" : plan::facts(s.op).title;
  return {.sequence = sequence,
          .func = name,
          .type = nccls_name(s.type),
          .count = elements_of(op),
          .with = plan::rooted(s.op) ? static_cast<int>(s.root) : 0,
          .input = op.input,
          .output = op.output};
}

}  // namespace

void Recorder::introduce(const Owner& owner) {
  check_dump();
  FlightPage& p = *slot_;
  p.rank = owner.rank;
  p.n_ranks = owner.n_ranks;
  p.group = owner.group;
  p.on_cuda_memory = owner.on_cuda_memory ? 1 : 0;
  copy_text(p.name, owner.name);
  slot_.note_hosts(owner.hosts);
  p.bytes = sizeof(FlightPage);
  p.magic.store(FlightPage::kMagic, std::memory_order_release);
  if (owner.profiler != nullptr) events_ = std::make_unique<profiler::Events>(owner.profiler);
}

void Recorder::tell_begin(size_t number, uint64_t sequence, const Operation& operation) {
  events_->begin(number, call_of(sequence, operation));
}

size_t Recorder::begin_message(const Signature& signature, bool is_send, void* data) {
  const size_t number = note(0, signature);
  if (events_ != nullptr) [[unlikely]] {
    events_->begin(number, {.is_message = true,
                            .func = is_send ? "Send" : "Recv",
                            .type = nccls_name(signature.type),
                            .count = signature.count,
                            .with = static_cast<int>(signature.root),
                            .output = data});
  }
  return number;
}

void Recorder::chose_another(size_t number, const char* algorithm) {
  if (events_ != nullptr) [[unlikely]]
    events_->chose(number, algorithm);
  FlightRecord* const r = record(number);
  if (r == nullptr) return;
  const size_t at = (number - 1) % kRecords;
  r->has_plan = 1;
  names_[at] = algorithm;
  copy_text(r->algorithm, algorithm);
}

void Recorder::end(size_t number, bool failed, uint64_t device_ns) {
  if (events_ != nullptr) [[unlikely]]
    events_->end(number, static_cast<int64_t>(device_ns));
  FlightRecord* const r = record(number);
  if (r == nullptr) return;
  r->end = Ticks::now();
  r->state = failed ? State::kFailed : State::kDone;
}

void Recorder::note_wait(const FlightWait& wait) {
  if (slot_->n_waits < FlightPage::kWaits) slot_->waits[slot_->n_waits++] = wait;
}

void Recorder::note_failure(Code code, std::string_view sentence) {
  slot_->code = code;
  copy_text(slot_->failure, sentence);
  slot_->failed_unix_ns = unix_ns();
}

std::vector<std::string> Recorder::lines(size_t most) const {
  std::vector<std::string> out;
  const FlightPage& p = *slot_;
  const size_t n = std::min({most, static_cast<size_t>(p.count), kRecords});
  const int64_t now = Ticks::now();
  for (size_t i = p.count - n; i < p.count; ++i) {
    const FlightRecord& r = p.records[i % kRecords];
    const bool running = r.state == State::kRunning;
    const char* state = running ? "RUNNING" : r.state == State::kFailed ? "FAILED" : "done";
    std::string line = format("#{} {} count {} {} {} plan {} {}", r.sequence, op_name(static_cast<moecclOp_t>(r.op)),
                              r.count, type_name(static_cast<moecclDataType_t>(r.type)), reduce_name(r.reduce),
                              r.has_plan != 0 ? r.algorithm : "", state);
    if (r.state != State::kDoneUntimed)
      line += format(" {:.3f} ms", static_cast<double>(Ticks::to_ns((running ? now : r.end) - r.start)) / 1e6);
    line += format(", {:.3f} s ago", static_cast<double>(Ticks::to_ns(now - r.start)) / 1e9);
    out.push_back(std::move(line));
  }
  return out;
}

}  // namespace moeccl::exec
